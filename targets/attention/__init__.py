"""Kernels of attention and of what it reads: pages of keys and values."""
