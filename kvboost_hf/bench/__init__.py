"""The benchmark behind `kvboost-hf bench`: the same prompts by every way of serving them, and by others' ways."""
