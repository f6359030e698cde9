"""PyTorch, where it is installed and sees the GPU: some parts of run_all.sh measure it, and none needs it."""

from __future__ import annotations

from typing import Any


def torch_here() -> Any:
    """The module, or None."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None
