"""Reading a call: the forward hook, its arguments, positions, media, and the ids behind a cache."""
