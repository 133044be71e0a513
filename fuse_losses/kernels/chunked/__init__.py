"""Row kernels in plain PyTorch, for the CPU and every device without a Triton kernel."""
