"""What a machine is said to lack for a CUDA variant: drivers are stand-ins that answer as cuda.h says."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmc.runtime import ArtifactError
from llmc.runtime.loading import cuda
from llmc.runtime.loading.artifact import inspect, open_artifact
from llmc.runtime.loading.package import Device

SM_86 = Device("cuda", "sm_86", "lib/libtvm_runtime_cuda.so")


class Driver:
    """A driver with devices of these compute capabilities; `status`: what it answers to being started."""

    def __init__(self, *devices: tuple[int, int], status: int = 0) -> None:
        self.devices, self.status = devices, status

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.devices)
        return 0

    def cuDeviceGet(self, handle: Any, number: int) -> int:
        handle._obj.value = number
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, handle: Any) -> int:
        value._obj.value = self.devices[handle.value][{75: 0, 76: 1}[attribute]]
        return 0


def machine(monkeypatch: pytest.MonkeyPatch, **libraries: Any) -> None:
    """A machine that has these libraries, by the part of their names before the first dot, and no others."""

    def load(name: str, *_: Any) -> Any:
        if name.partition(".")[0] not in libraries:
            raise OSError(f"{name}: cannot open shared object file")
        return libraries[name.partition(".")[0]]

    monkeypatch.setattr(ctypes, "CDLL", load)


@pytest.mark.parametrize(
    ("libraries", "wanted"),
    [
        ({}, r"an NVIDIA driver \(libcuda.so.1 is not here\)"),
        ({"libcuda": Driver()}, r"an NVIDIA device \(the driver finds none\)"),
        ({"libcuda": Driver((8, 6), status=100)}, r"an NVIDIA device \(the driver finds none, error 100\)"),
        ({"libcuda": Driver((8, 0), (9, 0)), "libcudart": 1}, r"a device that runs sm_86 \(here: sm_80, sm_90\)"),
        ({"libcuda": Driver((8, 0), (8, 9))}, r"libcudart.so.13 \(pip install nvidia-cuda-runtime\)"),
    ],
)
def test_what_is_missing_is_named(libraries: dict[str, Any], wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, **libraries)
    (lacking,) = cuda.lacking(SM_86)
    assert re.fullmatch(f"{wanted}.*", lacking)


def test_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, libcuda=Driver((8, 0), (8, 9)), libcudart=1)
    assert cuda.lacking(SM_86) == []


def test_a_device_of_several_is_asked_for_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, libcuda=Driver((8, 0), (8, 9)), libcudart=1)
    monkeypatch.setattr(cuda._Shown, "number", None)
    assert cuda.lacking(SM_86, 1) == []
    assert cuda.lacking(SM_86, 0) == ["a device that runs sm_86 (here: sm_80)"]
    assert cuda.lacking(SM_86, 2) == ["a device cuda:2 (here: 2)"]


@pytest.mark.parametrize(
    ("said", "number", "shown"),
    [(None, 0, "0"), (None, 3, "3"), ("2,3", 0, "2"), ("2, 3", 1, "3"), ("GPU-ab,GPU-cd", 1, "GPU-cd")],
)
def test_a_worker_sees_one_device(said: str | None, number: int, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _as_new(monkeypatch, said)
    for _ in range(2):  # of two artifacts, one after another
        cuda.show_only(number)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == shown
    with pytest.raises(ArtifactError, match=rf"cuda:{number + 1}: this process has cuda:{number}"):
        cuda.show_only(number + 1)


@pytest.mark.parametrize(("said", "number", "wanted"), [("", 0, "shows 0 devices"), ("2,3", 2, "shows 2 devices")])
def test_a_device_that_is_not_shown_is_refused(
    said: str, number: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _as_new(monkeypatch, said)
    with pytest.raises(ArtifactError, match=f"cuda:{number}: CUDA_VISIBLE_DEVICES {wanted}"):
        cuda.show_only(number)


def test_a_process_that_has_asked_for_all_devices_has_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, libcuda=Driver((8, 6), (8, 6)), libcudart=1)
    _as_new(monkeypatch, None)
    assert cuda.lacking(SM_86) == []
    with pytest.raises(ArtifactError, match="cuda:1: this process has asked for all devices"):
        cuda.show_only(1)
    cuda.show_only(0)


def _as_new(monkeypatch: pytest.MonkeyPatch, said: str | None) -> None:
    """As in a process that has asked for nothing, whose environment shows these devices."""
    monkeypatch.setattr(cuda._Shown, "number", None)
    monkeypatch.setattr(cuda._Shown, "asked", False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said or "")
    if said is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


def test_loaders_pass_over_variants_for_devices(
    fake_artifact: Path, reseal: Callable[[Path, dict[str, Any]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = json.loads((fake_artifact / "manifest.json").read_text())
    machine(monkeypatch)
    plain = manifest["variants"][0]
    device = {"kind": "cuda", "arch": "sm_90", "runtime": manifest["runtime"]}
    gpu = plain | {"name": "gpu", "arch": platform.machine(), "requires": ["cuda", "sm_90"], "device": device}
    manifest["variants"] = [gpu, plain]
    reseal(fake_artifact, manifest)
    found = inspect(fake_artifact)["machine"]
    assert found["variant"] == plain["name"]
    assert found["missing"]["gpu"] == ["an NVIDIA driver (libcuda.so.1 is not here)"]
    for wrong, what in (({"kind": "abacus"}, "device.kind"), ({"runtime": "lib/none.so"}, "is used but not listed")):
        manifest["variants"] = [gpu | {"device": device | wrong}, plain]
        reseal(fake_artifact, manifest)
        with pytest.raises(ArtifactError, match=what):
            open_artifact(fake_artifact)
    manifest["variants"] = [gpu]
    reseal(fake_artifact, manifest)
    with pytest.raises(ArtifactError, match="only compiled for GPUs: gpu needs an NVIDIA driver"):
        open_artifact(fake_artifact)
