"""Kernels in Triton for weights of four bits: GPUs, and any CPU under Triton's interpreter."""
