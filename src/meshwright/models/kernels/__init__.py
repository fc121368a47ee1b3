"""GPU kernels: Triton, FP8 and GEMM, with the PyTorch code that each one replaces."""
