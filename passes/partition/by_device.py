"""A model's module -> one for each device of a placement: by layer, by tensor, or both (docs/partition.md).

The graph is the plain one that the frontend made, so that a weight is still what it is in the model: a device's share
of it is a part of one matrix, and all passes that follow treat a device's module as any model's.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, relax

from llmc.compiler import kv_pages, ops
from llmc.compiler.errors import LlmcError
from llmc.compiler.placement import Placement
from llmc.passes.partition.device import DeviceWeights, LayerHeads, Member
from llmc.passes.partition.part import Part, WeightShare
from llmc.passes.partition.reading import ATTENDING, Reading, read
from llmc.passes.partition.rewriting import Rewriting
from llmc.passes.partition.stages import Stages, layers_of, stages_of


def partition(module: tvm.IRModule, placement: Placement) -> list[Part]:
    """The parts of the devices, by rank. `module` is as the frontend made it, with pages of all layers as an input.

    Raises LlmcError naming what there are too few of for so many devices: layers, heads, columns, experts.
    """
    module = relax.transform.DeadCodeElimination()(module)
    readings = {
        variable.name_hint: read(variable.name_hint, function)
        for variable, function in sorted(module.functions.items(), key=lambda item: item[0].name_hint)
        if isinstance(function, relax.Function)
    }
    heads = _heads(readings)
    if not heads:
        raise LlmcError("no function of the module reads pages of keys and values: nothing to partition by")
    convolved = {pages: layer for reading in readings.values() for pages, layer in reading.convolved.items()}
    if convolved and any(len(devices) > 1 for devices in placement.stages):
        raise LlmcError(f"{placement}: short convolutions are not shared by devices; divide by layer, as 0;1")
    layers = layers_of(max(convolved.get(pages, pages) for pages in heads) + 1, placement)
    stages = {name: stages_of(name, reading, layers) for name, reading in readings.items()}
    kept = [tuple(pages for pages in sorted(heads) if convolved.get(pages, pages) in own) for own in layers]
    return [
        _part(Member(placement, stage, place, kept[stage], heads), readings, stages)
        for stage, devices in enumerate(placement.stages)
        for place in range(len(devices))
    ]


def _heads(readings: dict[str, Reading]) -> dict[int, LayerHeads]:
    """The heads of each layer; pages of convolutions are of the shape that attention's have."""
    found: dict[int, LayerHeads] = {}
    for reading in readings.values():
        for value in reading.bound.values():
            match, layer = ops.match(value), reading.touched(value)
            if match is None or layer is None or match[0].name not in (*ATTENDING, "cross_attention"):
                continue
            attrs = match[2]
            heads, kv_heads, size = (int(attrs[name]) for name in ("heads", "kv_heads", "head_dim"))
            here = LayerHeads(heads, kv_heads, size, str(attrs["kv_dtype"]))
            if found.setdefault(layer, here) != here:
                raise LlmcError(f"layer {layer} keeps pages of {found[layer]} and of {here}")
    convolved = [pages for reading in readings.values() for pages in reading.convolved]
    return found | dict.fromkeys(convolved, next(iter(found.values()))) if found else {}


def _part(member: Member, readings: dict[str, Reading], stages: dict[str, Stages]) -> Part:
    weights, outputs = DeviceWeights(), {}
    written: dict[str, tuple[Rewriting, Any]] = {}
    for name, reading in readings.items():
        pages = None if reading.pages is None else _pages(reading, member)
        to = Rewriting(relax.BlockBuilder(), reading, stages[name], member, weights, pages)
        function, outputs[name] = _function(to, name)
        written[name] = to, function
    names = [str(each.name) for each in next(iter(readings.values())).weights if str(each.name) in weights.shares]
    shares = tuple(weights.shares[name] for name in names)
    module = tvm.IRModule({ir.GlobalVar(name): _taking(*each, shares) for name, each in written.items()})
    module = relax.transform.DeadCodeElimination()(relax.transform.Normalize()(module))
    kv_heads = tuple(len(member.heads_of(layer).kv) for layer in member.layers)
    device = member.placement.stages[member.stage][member.place]
    return Part(member.rank, member.stage, device, module, shares, tuple(member.layers), kv_heads, outputs)


def _function(to: Rewriting, name: str) -> tuple[Any, tuple[int, ...]]:
    """The new function, with its own weights as parameters, and which outputs of the old one it gives."""
    inputs = [to.pages if each.same_as(to.reading.pages) else each for each in to.reading.inputs]
    with to.builder.function(name, attrs={"num_input": len(inputs)}):
        with to.builder.dataflow():
            values, outputs = to.write()
            single = to.reading.single and len(values) == 1
            output = to.builder.emit_output(values[0] if single else relax.Tuple(values))
        to.builder.emit_func_output(output, [*inputs, *to.variables.values()])
    return to.builder.get()[name], outputs


def _taking(to: Rewriting, function: Any, shares: tuple[WeightShare, ...]) -> Any:
    """The function with all weights of its device as parameters, in their order."""
    own = [
        to.variables.get(share.name, relax.Var(share.name, relax.TensorType(share.shape, "float32")))
        for share in shares
    ]
    count = len(to.reading.inputs)
    return relax.Function(
        [*function.params[:count], *own], function.body, function.ret_ty, function.is_pure, function.attrs
    )


def _pages(reading: Reading, member: Member) -> Any:
    """The pages of a device's layers, of its heads."""
    types = []
    for layer in member.layers:
        pool, kind = reading.pages.ty.fields[layer], member.heads[layer]
        page = kv_pages.page_shape(kind.kv_dtype, len(member.heads_of(layer).kv), kind.size)
        types.append(relax.TensorType((pool.shape[0], *page), pool.dtype.dtype))
    return relax.Var(str(reading.pages.name), relax.TupleType(types))
