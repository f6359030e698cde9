"""Kernels that multiply with packed matrices or look up in them."""
