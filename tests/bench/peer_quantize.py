"""llama.cpp's importance matrix and quantizations, run by an interpreter that has llama-cpp-python.

python peer_quantize.py '{"imatrix": "x.npz", "source": "f32.gguf", "windows": "ids.json", "threads": 2}'
python peer_quantize.py '{"quantize": "Q4_K_M", "output": "x.gguf", "source": "f32.gguf", "imatrix_from": "x.npz"}'

The importance matrix is what `llama-imatrix` collects by default: for every matrix of the layers the mean square of
each input column, over windows of text (the embedding, and a head that shares its weights, get none).
"""

import ctypes
import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np
from llama_cpp import _ggml
from peer_context import Context

GGML_MAX_DIMS, GGML_MAX_OP_PARAMS, GGML_MAX_SRC, GGML_MAX_NAME = 4, 64, 10, 64  # ggml.h


class Tensor(ctypes.Structure):
    """struct ggml_tensor of ggml.h."""


Tensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * GGML_MAX_DIMS),
    ("nb", ctypes.c_size_t * GGML_MAX_DIMS),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * (GGML_MAX_OP_PARAMS // 4)),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(Tensor) * GGML_MAX_SRC),
    ("view_src", ctypes.c_void_p),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * GGML_MAX_NAME),
]


def main() -> None:
    """Do what the request says."""
    request = json.loads(sys.argv[1])
    if "quantize" in request:
        quantize(request["source"], request["output"], request["quantize"], request.get("imatrix_from"))
    else:
        windows = json.loads(Path(request["windows"]).read_text())
        np.savez(request["imatrix"], **importance(request["source"], windows, request["threads"]))


def importance(source: str, windows: list[list[int]], threads: int) -> dict[str, np.ndarray]:
    """Name of a matrix (N, K) -> (K,) float32 mean squares of its input columns."""
    sums: dict[str, np.ndarray] = {}
    rows: dict[str, int] = {}
    library = _ggml.libggml
    library.ggml_op_desc.restype = library.ggml_get_name.restype = ctypes.c_char_p
    library.ggml_op_desc.argtypes = library.ggml_get_name.argtypes = [ctypes.c_void_p]

    def look(address: int, ask: bool, _: object) -> bool:
        if library.ggml_op_desc(address) != b"MUL_MAT":
            return False
        tensor = Tensor.from_address(address)
        if tensor.name != library.ggml_get_name(address):
            raise SystemExit("struct ggml_tensor is laid out differently in this version of llama.cpp")
        weight, given = (tensor.src[number].contents for number in range(2))
        name = weight.name.decode()
        if not name.startswith("blk."):
            return False
        if not ask:
            columns, count = given.ne[0], given.ne[1] * given.ne[2] * given.ne[3]
            assert given.type == llama_cpp.GGML_TYPE_F32
            assert given.nb[1] == 4 * columns  # the rows lie one after another
            values = np.ctypeslib.as_array((ctypes.c_float * (columns * count)).from_address(given.data))
            squares = np.square(values.reshape(count, columns)).sum(0, dtype=np.float64)
            sums[name] = sums.get(name, 0) + squares
            rows[name] = rows.get(name, 0) + count
        return True

    size = len(windows[0])
    context = Context(source, size, size, threads, look)
    for number, ids in enumerate(windows):
        context.clear()
        context.read(ids, logits=False)
        print(f"window {number + 1}/{len(windows)}", file=sys.stderr)
    context.close()
    return {name: (total / rows[name]).astype(np.float32) for name, total in sums.items()}


def quantize(source: str, output: str, kind: str, imatrix: str | None) -> None:
    """Write `source` (float32, where quality counts) as llama.cpp's file type `kind`, such as Q4_K_M."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.nthread = 2
    params.allow_requantize = True  # the random model of models.py is Q8_0 at the most
    if imatrix is not None:
        held = dict(np.load(imatrix))
        entries = (llama_cpp.llama_model_imatrix_data * (len(held) + 1))()  # a nameless entry ends the list
        for entry, (name, values) in zip(entries, held.items(), strict=False):
            entry.name, entry.size = name.encode(), len(values)
            entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        params.imatrix = entries
    if llama_cpp.llama_model_quantize(source.encode(), output.encode(), ctypes.byref(params)) != 0:
        raise RuntimeError(f"{source}: llama.cpp cannot quantize it to {kind}")


if __name__ == "__main__":
    main()
