"""Runs the compiled functions of an artifact on a CUDA device: memory, copies, padded steps, captured steps."""
