"""What GPUs exchange by NCCL, as far as one GPU shows it: it sends to itself, as a step does it and captured.

    python tests/gpu/check_nccl.py PACK [--json FILE]

PACK/kernels has the kernel that adds. Needs llmc's runtime alone, and NCCL: where there is none, it says so. Ends with
1 if something differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from check_kernels import load_kernels, to_device

from llmc.runtime.cuda.cudart import TO_DEVICE
from llmc.runtime.cuda.device import Device, the_device
from llmc.runtime.cuda.exchange import ADD_PARTS
from llmc.runtime.cuda.nccl import Communicator, Piece, find_nccl

PARTS, ROWS, COLUMNS = 3, 37, 112


class Exchange:
    """Parts that are sent, added in their order, and put beside other columns; `put` gives new ones."""

    def __init__(self, device: Device, communicator: Communicator, add_parts: Callable[[Any, Any], Any]) -> None:
        self.device, self.communicator, self.add_parts = device, communicator, add_parts
        shape = (PARTS, ROWS * COLUMNS)
        self.sent, self.received = (to_device(device, np.full(shape, np.nan, np.float32)) for _ in range(2))
        self.total = to_device(device, np.full(shape[1], np.nan, np.float32))
        self.wide = to_device(device, np.full((ROWS, 2 * COLUMNS), -1, np.float32))

    def put(self, parts: np.ndarray) -> None:
        """Have these parts on the device, and nothing where results go."""
        poison = np.full_like(parts, np.nan)
        for tensor, array in ((self.sent, parts), (self.received, poison), (self.total, poison[0])):
            at = array.ctypes.data
            self.device.cudart.copy(tensor.data_ptr(), at, array.nbytes, TO_DEVICE, self.device.stream)
        self.device.wait()

    def run(self) -> None:
        """Put all of it on the stream."""
        device, nbytes = self.device, 4 * ROWS * COLUMNS
        sent, received = (
            [(0, Piece(tensor.data_ptr() + part * nbytes, nbytes)) for part in range(PARTS)]
            for tensor in (self.sent, self.received)
        )
        self.communicator.exchange(sent, received, device.stream)
        with device.ffi.use_raw_stream(device.handle, device.stream):
            self.add_parts(self.received, self.total)
        width = 4 * COLUMNS
        at = self.wide.data_ptr() + width
        device.cudart.copy_columns(at, 2 * width, self.total.data_ptr(), width, width, ROWS, device.stream)

    def right(self, parts: np.ndarray) -> bool:
        """Whether these were received and added, to the last bit."""
        wanted = parts[0].copy()
        for part in parts[1:]:
            wanted += part
        wide = self.device.read(self.wide)
        return (
            np.array_equal(self.device.read(self.received), parts)
            and np.array_equal(self.device.read(self.total), wanted)
            and np.array_equal(wide[:, COLUMNS:].reshape(-1), wanted)
            and bool((wide[:, :COLUMNS] == -1).all())
        )


def main() -> int:
    """Exchange, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    options = parser.parse_args()
    nccl, rows = find_nccl(), dict[str, Any]()
    if nccl is None:
        print("NCCL is not here (pip install nvidia-nccl-cu13): what GPUs exchange is not checked")
    else:
        kernels, device = load_kernels(options.pack / "kernels"), the_device()
        communicator = nccl.communicator(nccl.new_id(), 1, 0)
        device.waits = communicator.watched(_until)
        exchange, random = Exchange(device, communicator, kernels[ADD_PARTS]), np.random.default_rng()
        graph = None
        for name in ("as it is", "as it is, again", "captured", "captured, again"):
            parts = random.standard_normal((PARTS, ROWS * COLUMNS)).astype(np.float32)
            exchange.put(parts)
            if name == "captured":
                device.cudart.begin_capture(device.stream)
                exchange.run()
                graph = device.cudart.end_capture(device.stream)
            if graph is None:
                exchange.run()
            else:
                device.cudart.launch(graph, device.stream)
            rows[name] = exchange.right(parts)
        print(f"NCCL {nccl.version}: " + ", ".join(f"{name} {'right' if ok else 'WRONG'}" for name, ok in rows.items()))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0 if all(rows.values()) else 1


def _until(done: Callable[[], bool]) -> None:
    while not done():
        pass


if __name__ == "__main__":
    sys.exit(main())
