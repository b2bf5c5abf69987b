"""Compares ways to repair moved K/V: methods, models and workloads, by one command, on one page."""
