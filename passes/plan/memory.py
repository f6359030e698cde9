"""Bytes that a device needs: its weights, pages of keys and values for all queries, and a step's working space."""

from __future__ import annotations

from dataclasses import dataclass

from llmc.compiler.kv_pages import PAGE
from llmc.passes.plan.devices import Device
from llmc.passes.plan.held import Held, Model
from llmc.passes.plan.workload import Workload

FLOAT = 4
_ROWS = 6  # of the model's width that are alive at once: the sum, its norm, what is added, and their int8 codes


@dataclass(frozen=True)
class Memory:
    """Bytes of one device; `has` is what it has for a model."""

    weights: float
    pages: float
    working: float
    has: float

    @property
    def needs(self) -> float:
        """Together."""
        return self.weights + self.pages + self.working

    @property
    def lacks(self) -> float:
        """Bytes too few, 0 where it fits."""
        return max(0.0, self.needs - self.has)


def memory_of(model: Model, held: Held, device: Device, work: Workload) -> Memory:
    """What a device needs for `work.queries` queries at once, each at its full length."""
    weights = sum(tensor.bytes for tensor in held.outer)
    weights += sum(count * sum(tensor.bytes for tensor in model.tensors(kind, held.cut)) for kind, count in held.layers)
    return Memory(weights, kv_bytes(model, held, work), _working(model, held, work), device.memory - device.taken)


def kv_bytes(model: Model, held: Held, work: Workload) -> float:
    """Pages of the device's layers. A layer with a window keeps what it sees and the chunk that is being read."""
    page = model.page_bytes(held.kv_heads)
    translator = model.spec.encoder is not None
    total = 0.0
    for kind, count in held.layers:
        # An encoder leaves in its pages what the decoder's layers look at.
        kept = work.prompt_tokens if kind.encoder else work.new_tokens if translator else work.tokens
        if kind.window:
            kept = min(kept, kind.window + min(work.chunk, work.prompt_tokens))
        total += count * kind.pools * page * (-(-kept // PAGE) + 1)  # a page more, that a copy on write takes
    return total * work.queries


def _working(model: Model, held: Held, work: Workload) -> float:
    rows = max(work.queries, min(work.chunk, work.prompt_tokens))
    widest = max(
        (tensor.rows for kind, _ in held.layers for tensor in model.tensors(kind, held.cut) if not tensor.experts),
        default=0,
    )
    used = model.spec.experts.used * model.spec.experts.ffn
    logits = sum(tensor.rows for tensor in held.outer if tensor.name in ("head", "embedding")) * work.queries
    return FLOAT * (rows * (_ROWS * model.sizes["hidden"] + 2 * widest + 2 * used) + 2 * logits)
