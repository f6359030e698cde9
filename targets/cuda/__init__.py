"""GPUs by CUDA: what a chip can do, kernels made for it, and the way to machine code by nvcc (docs/cuda.md)."""
