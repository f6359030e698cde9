"""From timed steps of models on one device to what a devices file says of it: rates, and what a layer costs anyway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmc.compiler.kv_pages import PAGE
from llmc.compiler.placement import parse_placement
from llmc.passes.plan.costs import Costs, Segment
from llmc.passes.plan.devices import KV, Device, Devices, format_kind
from llmc.passes.plan.held import Model, Tensor

_ROUNDS = 4  # in which parts of the times are told from one another


@dataclass(frozen=True)
class Timed:
    """A model's measured times on one device: of decoding steps of one query by context, and of reading a prompt.

    `batch`: queries, and the seconds of a step of all of them at the context of `near`.
    """

    model: Model
    near: tuple[float, float]  # tokens in the cache, seconds of a step
    far: tuple[float, float]
    prompt: tuple[int, float]  # tokens, seconds
    batch: tuple[int, float] | None = None


@dataclass(frozen=True)
class Fitted:
    """`streams`: bytes a second by format and of pages; `ops`: operations a second by kind; the rest as of a Device."""

    streams: dict[str, float]
    layer_s: float
    ops: dict[str, float]
    row_s: float = 0.0
    exposed: float = 0.0


def fit(samples: Sequence[Timed], read: float, f32: float) -> Fitted:
    """What explains the samples, on a device that reads `read` bytes and does `f32` float operations a second.

    A step is a + b * context. b gives how fast pages are read. a is bytes of each format over its rate and a time for
    each layer: by least squares where there are more samples than formats, else with weights at the rate of memory, so
    that all that is left over is the layers'. Steps of several queries then say what of multiplying is not hidden
    behind reading, and with more than one model what each token costs besides; both are part of a in the next round.
    """
    slopes = [max(0.0, (each.far[1] - each.near[1]) / (each.far[0] - each.near[0])) for each in samples]
    bases = [each.near[1] - slope * each.near[0] for each, slope in zip(samples, slopes, strict=True)]
    kv = [kv_token_bytes(each.model) / slope for each, slope in zip(samples, slopes, strict=True) if slope > 0]
    pages = {KV: float(np.median(kv))} if kv else {}
    besides = [0.0] * len(samples)
    for _ in range(_ROUNDS):
        streams, layer_s = _rates(samples, [base - less for base, less in zip(bases, besides, strict=True)], read)
        streams |= pages
        ops = {"f32": f32} | _products(samples, layer_s, f32)
        device = Device("0", 0, np.inf, read, ops, streams, 0.0, layer_s)
        exposed, row_s = _besides(samples, device)
        besides = [exposed * _step(each.model, device, 1, 0)[1] + row_s for each in samples]
    return Fitted(streams, layer_s, ops, row_s, exposed)


def _products(samples: Sequence[Timed], layer_s: float, f32: float) -> dict[str, float]:
    """Operations a second by kind of number, of the prompts."""
    kinds: dict[str, list[float]] = {}
    for each in samples:
        tokens, seconds = each.prompt
        work = {kind: 2.0 * tokens * count for kind, count in _multiplied(each.model).items()}
        kind = max(work, key=lambda name: work[name])
        held = each.model.held(parse_placement("0"))[0]
        pairs = sum(count * Segment(1, tokens, 0).pairs(layer.window) for layer, count in held.layers)
        attention = 4.0 * held.heads * each.model.kv_size * pairs / f32
        left = max(seconds - min(attention, seconds / 2) - layer_s * held.layer_count, seconds / 10)
        kinds.setdefault(kind, []).append(sum(work.values()) / left)
    return {kind: float(np.median(rates)) for kind, rates in kinds.items()}


def _besides(samples: Sequence[Timed], device: Device) -> tuple[float, float]:
    """(exposed, row_s) that explain steps of several queries best, neither below 0."""
    rows, left = [], []
    for each in samples:
        if each.batch is not None:
            queries, seconds = each.batch
            longer, shorter = _step(each.model, device, queries, each.near[0])
            rows.append([shorter / seconds, queries / seconds])
            left.append(1 - longer / seconds)
    if not rows:
        return 0.0, 0.0
    matrix, wanted = np.array(rows), np.array(left)
    both = np.linalg.lstsq(matrix, wanted, rcond=None)[0] if len(rows) > 1 else np.array([-1.0, 0.0])
    if both.min() >= 0 and both[0] <= 1:
        return float(both[0]), float(both[1])
    alone = float(matrix[:, 0] @ wanted / (matrix[:, 0] @ matrix[:, 0]))
    return min(1.0, max(0.0, alone)), 0.0


def _step(model: Model, device: Device, queries: int, context: float) -> tuple[float, float]:
    """Seconds of a step of so many queries with all hidden that could be, and of what would be hidden."""
    held = model.held(parse_placement("0"))[0]
    load = [Segment(queries, 1, context)]
    hidden, shown = (
        Costs(model, Devices((device,), (), None), 1).device(held, replace(device, exposed=part), load, {}).total
        for part in (0.0, 1.0)
    )
    return hidden, shown - hidden


def _rates(samples: Sequence[Timed], bases: Sequence[float], read: float) -> tuple[dict[str, float], float]:
    sizes = [step_bytes(each.model) for each in samples]
    layers = np.array([float(each.model.layers) for each in samples])
    formats = sorted({name for size in sizes for name in size})
    matrix = np.array([[size[name] for name in formats] for size in sizes], float)
    seconds = np.array(bases)
    # Vectors, and routers that stay float32, are too few to say anything of their format.
    heavy = [place for place in range(len(formats)) if (matrix[:, place] > 0.02 * matrix.sum(axis=1)).any()]
    light = [place for place in range(len(formats)) if place not in heavy]
    seconds = seconds - matrix[:, light].sum(axis=1) / read
    unknown = np.column_stack([matrix[:, heavy], layers])
    if len(samples) > len(heavy):
        scale = unknown.max(axis=0)
        found = np.linalg.lstsq(unknown / scale / seconds[:, None], np.ones(len(samples)), rcond=None)[0] / scale
    else:
        left = (seconds - matrix[:, heavy].sum(axis=1) / read) / layers
        found = np.array([0.0] * len(heavy) + [float(np.median(left))])
    layer_s = max(0.0, float(found[-1]))
    streams = {}
    for place, column in enumerate(heavy):
        per_byte = found[place]
        if per_byte <= 0:  # what the layers leave of the time, of the samples that have most of it
            most = int(matrix[:, column].argmax())
            per_byte = max((seconds[most] - layer_s * layers[most]) / matrix[most, heavy].sum(), 1 / read)
        streams[formats[column]] = float(1 / per_byte)
    return streams, layer_s


def step_bytes(model: Model) -> Counter[str]:
    """Bytes of weights that a step of one token reads, by format."""
    found: Counter[str] = Counter()
    experts = model.spec.experts
    for tensor, count in _step_tensors(model):
        part = experts.used / experts.count if tensor.experts else 1.0
        found[tensor.format] += round(count * tensor.bytes * part)
    return found


def _multiplied(model: Model) -> Counter[str]:
    """Numbers that a token is multiplied with, by kind; the head is not among them, as a prompt's rows skip it."""
    found: Counter[str] = Counter()
    experts = model.spec.experts
    for tensor, count in _step_tensors(model):
        if not tensor.name.startswith(("head", "embedding")):
            part = experts.used / experts.count if tensor.experts else 1.0
            found[format_kind(tensor.format)] += round(count * tensor.numbers * part)
    return found


def _step_tensors(model: Model) -> Iterator[tuple[Tensor, int]]:
    held = model.held(parse_placement("0"))[0]
    for kind, count in held.layers:
        yield from ((each, count) for each in model.tensors(kind, held.cut) if each.matrix and each.decodes)
    tied = model.spec.head.tied and model.spec.head.kind == "logits"
    for tensor in held.outer:
        if tensor.matrix and tensor.decodes and (not tensor.looked_up or (tied and tensor.name == "embedding")):
            yield tensor, 1


def kv_token_bytes(model: Model) -> float:
    """Bytes of pages that a step reads for each token of its context; layers with a window count as any."""
    held = model.held(parse_placement("0"))[0]
    return held.layer_count * model.page_bytes(held.kv_heads) / PAGE
