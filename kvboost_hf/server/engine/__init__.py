"""The thread that runs the model: its queue, its tasks, and what is kept of sessions."""
