"""Estimates of how long computing, loading and storing K/V take."""
