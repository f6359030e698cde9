"""The file of devices: what it means, and that all that is wrong with it is named at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from llmc.compiler.errors import LlmcError
from llmc.passes.plan.devices import read_devices

sys.path.insert(0, str(Path(__file__).parent))
from plan_cases import TWO

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples" / "devices").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_are_read(path: Path) -> None:
    found = read_devices(path.read_text(), path.name)
    assert len(found.devices) == {"two_cores": 2, "eight_gpus": 9, "cluster": 256}[path.stem]
    assert len(found.by_name) == len(found.devices)


def test_numbers_go_on_from_node_to_node() -> None:
    text = """
[[node]]
count = 2
gb_s = 1
[[node.device]]
name = "cuda"
count = 3
memory_gb = 1
read_gb_s = 1
gops = { f32 = 1 }
[between]
latency_us = 5
gb_s = 2
"""
    found = read_devices(text)
    assert [device.name for device in found.devices] == [f"cuda:{number}" for number in range(6)]
    assert [device.node for device in found.devices] == [0, 0, 0, 1, 1, 1]
    assert found.link(found.devices[0], found.devices[1]).bytes_per_s == 1e9
    assert found.link(found.devices[0], found.devices[3]).seconds(2e9) == pytest.approx(1 + 5e-6)


def test_devices_of_different_kinds_meet_over_the_host_link() -> None:
    found = read_devices((ROOT / "examples" / "devices" / "eight_gpus.toml").read_text())
    gpu, host = found.by_name["cuda:0"], found.by_name["cpu:0"]
    assert found.link(gpu, host).bytes_per_s == 25e9
    assert found.link(gpu, found.by_name["cuda:1"]).bytes_per_s == 200e9


def test_rates_that_are_not_known_are_those_of_wider_numbers() -> None:
    device = read_devices(TWO.replace(", bf16 = 200, int8 = 400", "")).devices[0]
    assert device.rate("int8") == device.rate("f32") == 100e9
    assert read_devices(TWO).devices[0].rate("int8") == 400e9


def test_what_reads_together_shares_what_there_is() -> None:
    found = read_devices(TWO.replace("gb_s = 10\n", "gb_s = 10\ntogether_gb_s = 15\n", 1))
    assert found.share(found.devices[:1]) == {0: 1.0}
    assert found.share(found.devices) == {0: 0.75}


@pytest.mark.parametrize(
    ("text", "reasons"),
    [
        ("", [r"\[\[node\]\] is missing: machines with devices"]),
        ("[[node]]\ngb_s = 1", [r"\[\[node.device\]\] is missing"]),
        ("node = 3", ["node is 3, wanted tables"]),
        (TWO.replace("latency_us = 10", "latency_us = -1\ngbs = 2"), ["latency_us is -1, wanted", "key node.gbs"]),
        (TWO.replace("memory_gb = 1", ""), ["node.device.memory_gb is missing"]),
        (TWO.replace("memory_gb = 1", 'memory_gb = "a lot"'), ["memory_gb is 'a lot', wanted a number above 0"]),
        (TWO.replace("memory_gb = 1", "memory_gb = inf"), ["memory_gb is inf"]),
        (TWO.replace("read_gb_s = 10", "read_gb_s = 0"), ["read_gb_s is 0, wanted a number above 0"]),
        (TWO.replace("count = 2", "count = 0"), ["count is 0, wanted a whole number from 1"]),
        (TWO.replace("count = 2", "count = true"), ["count is True"]),
        (TWO.replace('"0"', '"tpu:0"'), ["name is 'tpu:0', wanted a number, cpu"]),
        (TWO.replace("f32 = 100", "f16 = 100"), ["unknown key node.device.gops.f16"]),
        (TWO.replace("{ f32 = 100, bf16 = 200, int8 = 400 }", "{}"), ["gops is nothing, wanted a rate"]),
        (TWO.replace("gb_s = 10\n", "gb_s = 10\nall_reduce = 'fast'\n", 1), ["is 'fast', wanted one of tree, gather"]),
        (TWO + "stream_gb_s = { q99 = 1 }", ["unknown key node.device.stream_gb_s.q99"]),
        (TWO.replace("[[node]]", "[[node]]\ncount = 2"), [r"\[between\] is missing: the link between machines"]),
        (TWO + TWO[TWO.index("[[node.device]]") :], ["named '0', but the next of its kind is 2"]),
        (TWO + TWO[TWO.index("[[node.device]]") :].replace('"0"', '"cuda"'), ["numbers alone beside named ones"]),
        ("a = ", ["not TOML"]),
        (
            TWO.replace("memory_gb = 1", "memory_gb = -1\nmemory = 3").replace("latency_us", "latency"),
            ["unknown key node.latency", "memory_gb is -1", "unknown key node.device.memory"],
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(text: str, reasons: list[str]) -> None:
    for reason in reasons:
        with pytest.raises(LlmcError, match=f"here.toml: .*{reason}"):
            read_devices(text, "here.toml")


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(LlmcError, match="no device 2, 3 in the devices file; it has 0, 1"):
        read_devices(TWO).placement("0;2;3")
