"""Kernels in Triton: NVIDIA GPUs from sm_80 on, AMD GPUs, and any CPU under Triton's interpreter."""
