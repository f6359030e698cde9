"""A long prompt read by several devices that stand in a ring: each has a part of its tokens, and all layers' weights.

Every row attends to every part, so in n ring steps a layer's keys and values, or its queries, go round:

- `keys one way`: blocks of keys and values go to the next device while the last ones are used (Ring Attention,
  https://arxiv.org/abs/2310.01889).
- `keys both ways`: one half of each block goes round one way, the other half the other way.
- `queries both ways`: keys and values stay where they are. A device's queries go round with what they have gathered
  so far (the mix of values, and the logarithm of the sum of their weights), one half each way, and while one half is
  on its way the other is worked on. The idea to send queries and partial results both ways is TokenRing's
  (https://arxiv.org/abs/2412.20501).

Links are those to two neighbours, each way `gb_s`. Tokens are dealt out so that causal attention is the same work for
all (each device has a piece from the front and one from the back), and sends of one step overlap its work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmc.compiler.errors import LlmcError
from llmc.passes.plan.costs import WIRE, Costs, Segment
from llmc.passes.plan.devices import Device, Devices, Link
from llmc.passes.plan.held import Model
from llmc.passes.plan.memory import Memory, memory_of
from llmc.passes.plan.predict import Placed
from llmc.passes.plan.simulate import Events, Station
from llmc.passes.plan.workload import Workload

WAYS = ("keys one way", "keys both ways", "queries both ways")


@dataclass(frozen=True)
class RingPlan:
    """One way round on `devices` devices. Times are seconds of the whole prompt, in all layers.

    `step_s`: one ring step, `work_s` of it work and `send_s` what its sends take. `forward` and `backward`: bytes that
    a device sends to the next one, and to the one before, for one layer.
    """

    way: str
    devices: int
    step_s: float
    work_s: float
    send_s: float
    attention_s: float
    rest_s: float
    forward: float
    backward: float
    memory: Memory

    @property
    def total_s(self) -> float:
        """Attention in the ring, and all else."""
        return self.attention_s + self.rest_s

    @property
    def hidden(self) -> float:
        """The part of the time of sends during which there is work."""
        return min(1.0, self.work_s / self.send_s) if self.send_s else 1.0


@dataclass(frozen=True)
class Rings:
    """What was tried, the quickest that fits, and the seconds of one device alone."""

    plans: tuple[RingPlan, ...]
    best: RingPlan
    alone_s: float


def plan_ring(model: Model, devices: Devices, work: Workload) -> Rings:
    """All ways round, on every number of devices up to all that are as the first one.

    Raises LlmcError for a model that no prompt can be cut for, or where none fits.
    """
    spec = model.spec
    if spec.encoder is not None or spec.attention.kind == "mla":
        raise LlmcError("ring: for models whose attention has keys and values of its own, and no encoder")
    alike = [device for device in devices.devices if device.alike == devices.devices[0].alike]
    if len(alike) < 2:
        raise LlmcError("ring: wanted two devices that are alike, at least")
    counts = sorted({2**power for power in range(1, len(alike).bit_length()) if 2**power <= len(alike)} | {len(alike)})
    counts = [count for count in counts if count <= work.prompt_tokens]
    plans = [ring(model, devices, alike[:count], work, way) for count in counts for way in WAYS]
    fitting = [plan for plan in plans if not plan.memory.lacks]
    if not fitting:
        least = min(plans, key=lambda plan: plan.memory.lacks)
        raise LlmcError(
            f"ring: nothing fits; on {least.devices} devices each needs {least.memory.needs / 1e9:.2f} GB, has "
            f"{least.memory.has / 1e9:.2f} GB"
        )
    return Rings(tuple(plans), min(fitting, key=lambda plan: plan.total_s), alone(model, devices, alike[0], work))


def alone(model: Model, devices: Devices, device: Device, work: Workload) -> float:
    """Seconds that one device reads the prompt in, in chunks."""
    placed = Placed(model, devices, devices.placement(device.name))
    return placed.first_token(replace(work, queries=1))


def ring(model: Model, devices: Devices, members: list[Device], work: Workload, way: str) -> RingPlan:
    """One way round on some devices."""
    count, tokens = len(members), -(-work.prompt_tokens // len(members))
    device = members[0]
    held = model.held(devices.placement(device.name))[0]
    costs = Costs(model, devices, 1)
    share = devices.share(members)
    whole = costs.device(held, device, [Segment(1, tokens, 0)], share)
    layers = held.layer_count
    pairs = _attention(model, costs, device, share, work.prompt_tokens) / layers
    worked = pairs / count / count  # of a layer, of one ring step of one device
    link = _slowest(devices, members)
    forward, backward, once, halves = _sends(model, count, tokens, way)
    send = link.latency_s + once / link.bytes_per_s
    layer = ring_s(count, worked, send, halves)
    step = max(worked, worked / 2 + send) if halves else max(worked, send)
    rest = whole.linear + whole.fixed
    one = replace(work, queries=1, prompt_tokens=tokens, new_tokens=work.new_tokens)
    return RingPlan(
        way, count, step * layers, worked * layers, send * layers, layer * layers, rest, forward, backward,
        memory_of(model, held, device, one),
    )  # fmt: skip


def ring_s(count: int, work: float, send: float, halves: bool) -> float:
    """Seconds of a layer's attention in n ring steps, each of so much work and so long a send.

    Keys: the first step works on what is there, each other one waits for the longer of work and send. `halves` of
    queries: two take turns, so a round is all the work, or half of it and a send; at the end both go home.
    """
    if halves:
        return (count - 1) * max(work, work / 2 + send) + work + send
    return work + (count - 1) * max(work, send)


def simulated_ring_s(count: int, work: float, send: float, halves: bool) -> float:
    """The same by simulation of every device and link: what tests compare `ring_s` with."""
    events = Events()
    devices = [Station(events) for _ in range(count)]
    ways = {step: [Station(events) for _ in range(count)] for step in (1, -1)}
    last = [0.0]

    def note() -> None:
        last[0] = max(last[0], events.now)

    def query(at: int, step: int, left: int) -> None:
        """A half of some device's queries is at a device; `left` devices are to come, this one among them."""

        def worked() -> None:
            ways[step][at].serve(send, lambda: query((at + step) % count, step, left - 1) if left > 1 else note())

        devices[at].serve(work / 2, worked)

    def keys(at: int, left: int) -> None:
        """A block of keys is at a device, which passes it on at once and works on it."""
        devices[at].serve(work, note)
        if left > 1:
            ways[1][at].serve(send, lambda: keys((at + 1) % count, left - 1))

    for device in range(count):
        if halves:
            query(device, 1, count)
            query(device, -1, count)
        else:
            keys(device, count)
    events.run()
    return last[0]


def _attention(model: Model, costs: Costs, device: Device, share: dict[int, float], tokens: int) -> float:
    """Seconds of attention of the whole prompt, on one device, in all layers."""
    held = model.held(costs.devices.placement(device.name))[0]
    return costs.device(held, device, [Segment(1, tokens, 0)], share).attention


def _sends(model: Model, count: int, tokens: int, way: str) -> tuple[float, float, float, bool]:
    """Bytes of a layer that a device sends forward and backward, those of one send, and whether halves take turns.

    Queries carry no result on their first way and are not needed on their last, which goes home.
    """
    sizes, attention = model.sizes, model.spec.attention
    keys = 2.0 * sizes["kv"] * tokens * WIRE
    if way == WAYS[0]:
        return (count - 1) * keys, 0.0, keys, False
    if way == WAYS[1]:
        return (count - 1) * keys / 2, (count - 1) * keys / 2, keys / 2, False
    result = float(sizes["mixed"] + attention.heads) * tokens * WIRE
    asked = float(sizes["q"]) * tokens * WIRE
    each = (count - 1) * asked + count * result  # a result goes along from the first device on, as the owner is it
    return each / 2, each / 2, (asked + result) / 2, True


def _slowest(devices: Devices, members: list[Device]) -> Link:
    pairs = zip(members, [*members[1:], members[0]], strict=True)
    return min((devices.link(one, other) for one, other in pairs), key=lambda link: link.bytes_per_s)
