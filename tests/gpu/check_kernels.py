"""Every CUDA kernel on a GPU against what its op means: random inputs of the pack, outputs full of other numbers.

    python tests/gpu/check_kernels.py PACK [--json FILE]

PACK/kernels has one library of all kernels, and of each case a file with operands before and after, and outputs, as
NumPy gives them. Needs llmc's runtime alone. Ends with 1 if a kernel differs.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from llmc.runtime.cuda.cudart import TO_DEVICE
from llmc.runtime.cuda.device import Device, the_device
from llmc.runtime.loading import library

Row = dict[str, Any]
POISON = 0x4D  # a byte: of outputs before
KEYS_OFF = 1e-6  # of the greatest number: a GPU rounds a product and a sum once, NumPy twice


def load_kernels(folder: Path) -> Any:
    """The module of all kernels."""
    ffi = library.import_ffi()
    ctypes.CDLL(str(folder / "libtvm_runtime.so"), ctypes.RTLD_GLOBAL)
    library.load_cuda_runtime(folder / "libtvm_runtime_cuda.so")
    return ffi.load_module(str(folder / "kernels.so"))


def to_device(device: Device, array: np.ndarray) -> Any:
    """A tensor with the array's numbers."""
    tensor = device.tensor(array.shape, array.dtype, "a kernel's operand")
    array = np.ascontiguousarray(array)
    if array.nbytes:
        device.cudart.copy(tensor.data_ptr(), array.ctypes.data, array.nbytes, TO_DEVICE, device.stream)
    return tensor


def run(
    device: Device, function: Any, case: dict[str, np.ndarray], tolerance: float, turned: bool, rounded: bool
) -> tuple[float, bool]:
    """The worst difference of outputs, of the greatest number; and whether all is as it should be.

    `rounded`: the last output is pairs of bfloat16.
    """
    before = [case[f"before_{i}"] for i in range(sum(name.startswith("before_") for name in case))]
    wanted = [case[f"output_{i}"] for i in range(sum(name.startswith("output_") for name in case))]
    poison = [_filled(w.shape, w.dtype, POISON) for w in wanted]
    workspaces = [case[f"workspace_{i}"] for i in range(sum(name.startswith("workspace_") for name in case))]
    poison += [_filled(each.shape[1:], each.dtype, 0xFF) for each in workspaces]  # NaN, where it is floats
    tensors = [to_device(device, array) for array in [*before, *poison]]
    with device.ffi.use_raw_stream(device.handle, device.stream):
        function(*tensors)
    found = [device.read(tensor) for tensor in tensors]
    worst, right = 0.0, True
    outputs = list(zip(found[len(before) : len(before) + len(wanted)], wanted, strict=True))
    if rounded:
        mine, theirs = outputs.pop()
        outputs.append((_floats(mine), _floats(theirs)))
    for mine, theirs in outputs:
        off = difference(mine, theirs)
        worst, right = max(worst, off), right and off <= (0 if mine.dtype.kind in "iu" else tolerance)
    for number, mine in enumerate(found[: len(before)]):
        after = case.get(f"after_{number}", before[number])
        right = right and same(mine, after, turned)
    return worst, right


def same(found: np.ndarray, wanted: np.ndarray, turned: bool) -> bool:
    """Whether an operand is what it should be after the kernel; keys that it `turned` may be off by a rounding."""
    if turned and found.dtype.kind == "f":
        return difference(found, wanted) <= KEYS_OFF
    if found.dtype.kind == "f":
        return np.array_equal(found.reshape(-1).view(np.uint8), wanted.reshape(-1).view(np.uint8))
    off = np.abs(found.astype(np.int64) - wanted.astype(np.int64))
    return bool((off <= (turned and found.dtype == np.uint16)).all())


def _floats(pairs: np.ndarray) -> np.ndarray:
    """The numbers of pairs of bfloat16."""
    return (pairs.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _filled(shape: tuple[int, ...], dtype: np.dtype, byte: int) -> np.ndarray:
    """An array of one byte."""
    return np.full((*shape, dtype.itemsize), byte, np.uint8).view(dtype).reshape(shape)


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    """The greatest, of the greatest number; infinite where one is no number and the other is."""
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return float("inf")
    a, b = np.nan_to_num(a), np.nan_to_num(b)
    return float(np.abs(a - b).max(initial=0) / max(float(np.abs(b).max(initial=0)), 1e-6))


def main() -> int:
    """Run all cases, print those that differ and the worst of each op."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    options = parser.parse_args()
    folder = options.pack / "kernels"
    module, device, rows = load_kernels(folder), the_device(), list[Row]()
    for entry in json.loads((folder / "cases.json").read_text()):
        with np.load(folder / entry["file"]) as arrays:
            turned = entry["op"].startswith("rope_attention")
            worst, right = run(
                device, module[entry["function"]], dict(arrays), entry["tolerance"], turned, entry["rounded"]
            )
        rows.append({"op": entry["op"], "case": entry["function"], "worst": worst, "right": right})
        if not right:
            print(f"{entry['function']} ({entry['op']}): differs by {worst:.1e}, at most {entry['tolerance']:.1e}")
    for op in sorted({row["op"] for row in rows}):
        mine = [row for row in rows if row["op"] == op]
        right = sum(row["right"] for row in mine)
        print(f"{op:24} {right:4} of {len(mine):4} right, worst {max(row['worst'] for row in mine):.1e}")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0 if rows and all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
