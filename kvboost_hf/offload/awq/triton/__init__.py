"""Triton kernels for 4-bit weights, for GPUs, and for CPUs by Triton's interpreter."""
