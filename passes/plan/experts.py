"""Which device has which expert of which layer: even work, and few tokens that change machines between layers.

MoETuner (https://arxiv.org/abs/2502.06643) in our words: tokens that go to one expert in a layer tend to go to certain
ones in the next, so experts that follow one another are put where tokens need not travel, while every device gets the
same number of experts and about as many tokens. The paper solves an integer program; here layers are filled one after
another, by the tokens that experts take and by where these come from, then pairs of experts change places while that
makes the sum of times less. A token's way within a machine costs that machine's link, between machines the link
between, and a layer waits for the device with most tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.errors import LlmcError
from llmc.compiler.spec import ModelSpec
from llmc.passes.plan.costs import WIRE
from llmc.passes.plan.devices import Device, Devices, format_kind
from llmc.passes.plan.held import Model

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
_SMALL, _DRAWN = 512, 8  # experts in all; placements drawn at random
_ROUNDS = 20  # of all layers, forth and back
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Routing:
    """Where tokens went: `loads` (L, E) tokens of each expert of each layer that has experts, `moves` (L - 1, E, E)
    tokens that went to one expert in a layer and to the other in the next one."""

    loads: F64
    moves: F64


@dataclass(frozen=True)
class Costs:
    """Seconds that a token takes an expert's device, and on its way from device to device: (D, D), 0 on the spot."""

    token_s: F64  # (D,)
    way_s: F64


@dataclass(frozen=True)
class Placed:
    """`of` (L, E): the device of each expert. `seconds`: of all tokens of the routing, work and ways.

    `imbalance`: the fullest device's tokens over the average, on average over layers. `crossing`: the part of moves
    that change machines.
    """

    of: I64
    seconds: float
    imbalance: float
    crossing: float


@dataclass(frozen=True)
class Placements:
    """What was found, beside what partition does today (blocks in order) and experts dealt out in turn."""

    best: Placed
    in_order: Placed
    in_turn: Placed
    devices: tuple[str, ...]


def read_routing(path: Path) -> Routing:
    """The routing in a file: JSON, or arrays of .npz, with `trace`, or with `loads` and `moves`.

    `trace` (tokens, layers, experts used) has numbers of experts; it must be of one text whose tokens follow it row by
    row. Raises LlmcError naming what is missing, unknown, or not of its shape.
    """
    values = _read_npz(path) if path.suffix == ".npz" else _read_json(path)
    unknown = sorted(set(values) - {"trace", "loads", "moves"})
    if unknown or ("trace" in values) == ("loads" in values or "moves" in values) or len(values) > 2:
        named = f"unknown key {', '.join(unknown)}; " if unknown else ""
        raise LlmcError(
            f"{path}: {named}wanted `trace`, or `loads` and `moves`, got {', '.join(sorted(values)) or 'nothing'}"
        )
    if "trace" in values:
        return of_trace(_array(values["trace"], "trace", 3, path))
    if set(values) != {"loads", "moves"}:
        raise LlmcError(f"{path}: `loads` and `moves` go together; got {', '.join(values)} alone")
    loads, moves = _array(values["loads"], "loads", 2, path), _array(values["moves"], "moves", 3, path)
    wanted = (len(loads) - 1, loads.shape[1], loads.shape[1])
    if moves.shape != wanted:
        raise LlmcError(f"{path}: moves is of shape {moves.shape}, wanted {wanted} for loads of shape {loads.shape}")
    return Routing(loads, moves)


def _read_npz(path: Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except OSError as error:
        raise LlmcError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}") from error
    except (ValueError, KeyError, EOFError) as error:
        raise LlmcError(f"{path}: no .npz file of plain arrays: {error}") from None
    except Exception as error:  # zipfile's own
        raise LlmcError(f"{path}: no .npz file: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise LlmcError(f"{path}: more than {_MOST_BYTES} bytes")
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LlmcError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}") from error
    except (ValueError, RecursionError) as error:
        raise LlmcError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise LlmcError(f"{path}: wanted an object with `trace`, or with `loads` and `moves`")
    return found


def _array(value: Any, name: str, dimensions: int, path: Path) -> F64:
    try:
        found = np.asarray(value, np.float64)
    except (ValueError, TypeError):
        raise LlmcError(f"{path}: {name} is no array of numbers with rows of one length") from None
    if found.ndim != dimensions or not found.size or not np.isfinite(found).all() or (found < 0).any():
        raise LlmcError(
            f"{path}: {name} of shape {found.shape}: wanted {dimensions} dimensions of numbers that are at least 0"
        )
    return found


def of_trace(trace: F64, experts: int | None = None) -> Routing:
    """The routing of a trace (tokens, layers, used); `experts`: how many there are, at least those that are named."""
    ids = trace.astype(np.int64)
    count = int(ids.max()) + 1 if experts is None else experts
    layers = ids.shape[1]
    loads = np.stack([np.bincount(ids[:, layer].ravel(), minlength=count) for layer in range(layers)]).astype(float)
    moves = np.zeros((layers - 1, count, count))
    for layer in range(layers - 1):
        before = np.repeat(ids[:, layer], ids.shape[2], axis=1).ravel()  # each with each
        after = np.tile(ids[:, layer + 1], (1, ids.shape[2])).ravel()
        np.add.at(moves[layer], (before, after), 1.0 / ids.shape[2])
    return Routing(loads, moves)


def check_routing(routing: Routing, spec: ModelSpec) -> Routing:
    """The routing with as many experts as the model has. Raises LlmcError where it is not of such a model."""
    experts = spec.experts
    if not experts.count:
        raise LlmcError("the model has no experts to place")
    layers, count = routing.loads.shape
    if layers != len(experts.layers) or count > experts.count:
        raise LlmcError(
            f"the routing is of {layers} layers and {count} experts; the model has {experts.count} experts in "
            f"{len(experts.layers)} layers"
        )
    more = experts.count - count  # that the text did not use
    return Routing(np.pad(routing.loads, ((0, 0), (0, more))), np.pad(routing.moves, ((0, 0), (0, more), (0, more))))


def costs_of(model: Model, devices: Devices) -> Costs:
    """What a token costs on these devices: an expert's three matrices, and the way of the model's width there."""
    spec = model.spec
    numbers = 3 * spec.experts.ffn * spec.sizes.hidden
    kind = _expert_format(model)
    token = np.array([2 * numbers / device.rate(format_kind(kind)) for device in devices.devices])
    size = spec.sizes.hidden * WIRE

    def way(one: Device, other: Device) -> float:
        return 0.0 if one is other else size / devices.link(one, other).bytes_per_s

    return Costs(token, np.array([[way(one, other) for other in devices.devices] for one in devices.devices]))


def _expert_format(model: Model) -> str:
    for kinds in model.kinds:
        for kind in kinds:
            for name, format in kind.formats:
                if name.endswith("experts.down"):
                    return format
    raise LlmcError("the model has no experts to place")


def place_experts(routing: Routing, costs: Costs, devices: Devices) -> Placements:
    """The best placement found, and two to compare it with. Raises LlmcError where there are fewer experts than
    devices."""
    layers, experts = routing.loads.shape
    count = len(devices.devices)
    if experts < count:
        raise LlmcError(f"{count} devices cannot share {experts} experts: each needs one at least")
    in_order = np.tile(np.arange(experts) * count // experts, (layers, 1))
    in_turn = np.tile(np.arange(experts) % count, (layers, 1))
    nodes = np.array([device.node for device in devices.devices])
    starts = [filled(routing, costs), in_order, in_turn]
    if layers * experts <= _SMALL:  # where it costs nothing: others, from which swaps lead elsewhere
        draw = np.random.default_rng(0)
        starts += [draw.permuted(in_order, axis=1) for _ in range(_DRAWN)]
    improved = [improve(start.copy(), routing, costs) for start in starts]
    rated = [rate(each, routing, costs, nodes) for each in improved]
    best = min(rated, key=lambda each: each.seconds)
    names = tuple(device.name for device in devices.devices)
    return Placements(best, rate(in_order, routing, costs, nodes), rate(in_turn, routing, costs, nodes), names)


def rate(of: I64, routing: Routing, costs: Costs, nodes: I64) -> Placed:
    """What a placement costs: in every layer the slowest device's work, and all ways between layers."""
    by_device = _by_device(of, routing.loads, len(costs.token_s))
    crossing = total = 0.0
    for layer, moves in enumerate(routing.moves):
        other = nodes[of[layer]][:, None] != nodes[of[layer + 1]][None, :]
        crossing += float(moves[other].sum())
        total += float(moves.sum())
    average = by_device.mean(axis=1)
    fullest = np.divide(by_device.max(axis=1), average, out=np.ones_like(average), where=average > 0)
    return Placed(of, seconds(of, routing, costs), float(fullest.mean()), crossing / total if total else 0.0)


def seconds(of: I64, routing: Routing, costs: Costs) -> float:
    """The sum that is made small."""
    work = (_by_device(of, routing.loads, len(costs.token_s)) * costs.token_s).max(axis=1).sum()
    devices = len(costs.token_s)  # ways are gone in all devices at once
    ways = sum(
        float((moves * costs.way_s[of[layer]][:, of[layer + 1]]).sum()) for layer, moves in enumerate(routing.moves)
    )
    return float(work) + ways / devices


def _by_device(of: I64, loads: F64, devices: int) -> F64:
    return np.stack([np.bincount(row, load, devices) for row, load in zip(of, loads, strict=True)])


def filled(routing: Routing, costs: Costs) -> I64:
    """Layer by layer, the expert with most tokens first, to the device with room where it adds least."""
    layers, experts = routing.loads.shape
    devices = len(costs.token_s)
    of = np.zeros((layers, experts), np.int64)
    for layer in range(layers):
        room = np.full(devices, experts // devices)
        room[: experts % devices] += 1
        work = np.zeros(devices)
        ways = np.zeros((experts, devices))
        if layer:
            ways = routing.moves[layer - 1].T @ costs.way_s[of[layer - 1]] / devices
        for expert in np.argsort(-routing.loads[layer], kind="stable"):
            after = work + routing.loads[layer, expert] * costs.token_s
            added = np.maximum(after, work.max()) - work.max() + ways[expert]
            # Of equal ones the emptiest, so that the fullest grows as late as can be.
            added = np.where(room > 0, added + 1e-9 * after, math.inf)
            device = int(added.argmin())
            of[layer, expert], work[device] = device, after[device]
            room[device] -= 1
    return of


def improve(of: I64, routing: Routing, costs: Costs) -> I64:
    """Let two experts of a layer change places, the pair that gains most, until no pair gains."""
    for _ in range(_ROUNDS):
        changed = False
        for layer in range(len(of)):
            while swap_best(of, layer, routing, costs):
                changed = True
        if not changed:
            break
    return of


def swap_best(of: I64, layer: int, routing: Routing, costs: Costs) -> bool:
    """Swap the pair of a layer that makes the seconds least; False where none makes them less."""
    here, loads = of[layer], routing.loads[layer]
    devices, experts = len(costs.token_s), len(loads)
    ways = np.zeros((experts, devices))  # of an expert on a device, with all others where they are
    if layer:
        ways += routing.moves[layer - 1].T @ costs.way_s[of[layer - 1]]
    if layer < len(of) - 1:
        ways += routing.moves[layer] @ costs.way_s[:, of[layer + 1]].T
    ways /= devices
    own: F64 = ways[np.arange(experts), here]
    there = ways[:, here]  # (expert, whose place)
    change = there + there.T - own[:, None] - own[None, :]
    work: F64 = np.bincount(here, loads, devices).astype(np.float64)
    change += _fullest_after(here, loads, work, costs.token_s) - float((work * costs.token_s).max())
    change[here[:, None] == here[None, :]] = 0.0
    one, other = np.unravel_index(int(change.argmin()), change.shape)
    scale = max(float((work * costs.token_s).max()), float(own.sum()), 1e-300)
    if change[one, other] >= -1e-12 * scale:
        return False
    here[one], here[other] = here[other], here[one]
    return True


def _fullest_after(here: I64, loads: F64, work: F64, token_s: F64) -> F64:
    """(E, E): the slowest device's work after a swap."""
    times = work * token_s
    order = np.argsort(-times)[:3]  # of three, one at least is not of the pair
    rest = np.full((len(loads), len(loads)), 0.0)
    for device in order[::-1]:
        outside = (here[:, None] != device) & (here[None, :] != device)
        rest = np.where(outside, times[device], rest)
    gained = loads[None, :] - loads[:, None]
    first = (work[here][:, None] + gained) * token_s[here][:, None]
    second = (work[here][None, :] - gained) * token_s[here][None, :]
    return np.maximum(rest, np.maximum(first, second))


def device_names(placed: Placed, names: Sequence[str]) -> list[list[str]]:
    """The device of each expert of each layer, by name."""
    return [[names[device] for device in row] for row in placed.of]
