"""Checks of TurboQuant's paper on a model's own K/V: `python -m benchmarks.turboquant --model NAME`."""
