"""Real libraries over a real model that `attach` serves, beside the same calls without it."""
