"""What the CUDA kernel is asked, and a CPU that runs it."""
