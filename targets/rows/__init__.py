"""Kernels that go row by row: norms, activations, positions, rounding, the best logits."""
