"""A program that torch.export saved (.pt2) -> Relax, by TVM's importer of exported programs.

torch.export.load is not made for files of strangers: it unpickles sample inputs, and tensors that say so, and evaluates
the text of symbolic sizes. So the archive is read here first, strictly, and torch is given one that holds nothing but
what was understood: a graph of ATen operators, sizes that are sums and products of names, and tensors as plain bytes.
Format: https://docs.pytorch.org/docs/stable/export/pt2_archive.html
"""

from __future__ import annotations

import ast
import io
import json
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import ir, relax, tirx

from llmc.compiler import ops
from llmc.compiler.errors import SourceError
from llmc.compiler.spec.fields import clip
from llmc.frontends.files.mapped_file import MappedFile, open_mapped
from llmc.frontends.files.stored_zip import stored_files
from llmc.frontends.files.strict_json import read_json
from llmc.frontends.importers import sizes
from llmc.frontends.importers.imported import LEAST_WEIGHT, STEP, Imported, Port
from llmc.frontends.model_name import clean_name

MAX_TEXT = 256 << 20  # bytes of the program's JSON
_TARGET = re.compile(r"torch\.ops\.aten\.[a-z_0-9]+\.[A-Za-z_0-9]+|_operator\.(add|sub|mul|floordiv|mod|neg|getitem)")
_SYMBOL = re.compile(r"[su][0-9]+")
# What the text of a symbolic size may call, and the names of its arguments.
_CALLS = {"Symbol", "Integer", "Add", "Mul", "Pow", "Max", "Min", "Mod", "PythonMod", "FloorDiv", "CleanDiv"}
_ARGUMENTS = {"positive", "integer", "nonnegative", "evaluate"}
_NODES = (ast.Expression, ast.Call, ast.Name, ast.Constant, ast.keyword, ast.BinOp, ast.UnaryOp, ast.Load, ast.Add,
          ast.Sub, ast.Mult, ast.Pow, ast.FloorDiv, ast.USub)  # fmt: skip
_SPECS = re.compile(r"builtins\.(tuple|list|dict)|null")


def import_exported(path: Path) -> Imported:
    """The program in a .pt2 file. Raises SourceError naming what is not understood."""
    file = open_mapped(path, minimum=64)
    program, archive = _checked(file)
    try:
        import torch
    except ImportError:
        raise SourceError("reading .pt2 needs the package torch; install it, or export to ONNX") from None
    from tvm.relax.frontend.torch import from_exported_program

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            loaded = torch.export.load(_packed(archive))
            module = from_exported_program(loaded, keep_params_as_input=True)
        except Exception as error:  # whatever torch and TVM raise for a program that they do not take
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise SourceError(f"{path.name}: cannot be converted: {reason[:300]}") from error
    return _as_imported(module, path, program)


def _checked(file: MappedFile) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The program's JSON, and the files of an archive that holds only what was understood."""
    places = stored_files(file)
    homes = {name.split("/")[0] for name in places}
    if len(homes) != 1:
        raise SourceError(f"{file.name}: an archive of {clip(sorted(homes))}, wanted what torch.export.save writes")
    home = homes.pop()

    def read(name: str) -> bytes:
        if f"{home}/{name}" not in places:
            raise SourceError(f"{file.name}: no {name} in the archive; wanted what torch.export.save writes")
        offset, count = places[f"{home}/{name}"]
        if name.endswith(".json") and count > MAX_TEXT:
            raise SourceError(f"{file.name}: {name} of {count} bytes, wanted at most {MAX_TEXT}")
        return bytes(file.bytes_at(offset, count))

    if read("archive_format").strip() != b"pt2" or read("byteorder").strip() != b"little":
        raise SourceError(f"{file.name}: wanted an archive of torch.export of a little-endian machine")
    program = read_json(read("models/model.json"), "models/model.json")
    faults = _faults(program)
    kept = {name: read(name) for name in ("archive_format", "archive_version", "byteorder", ".data/version")}
    for kind in ("weights", "constants"):
        name = f"data/{kind}/model_{kind}_config.json"
        config = read_json(read(name), name)
        for title, entry in _entries(config, name, file):
            if entry.get("use_pickle") is not False or not isinstance(entry.get("path_name"), str):
                faults.append(f"{clip(title)} is stored as a pickle, which may run code")
                continue
            kept[f"data/{kind}/{entry['path_name']}"] = read(f"data/{kind}/{entry['path_name']}")
        kept[name] = json.dumps(config).encode()
    if faults:
        more = f" and {len(faults) - 10} more" if len(faults) > 10 else ""
        raise SourceError(f"{file.name}: {'; '.join(dict.fromkeys(faults[:10]))}{more}")
    kept["models/model.json"] = json.dumps(program).encode()
    return program, kept


def _entries(config: dict[str, Any], name: str, file: MappedFile) -> list[tuple[str, dict[str, Any]]]:
    table = config.get("config")
    if not isinstance(table, dict) or not all(isinstance(entry, dict) for entry in table.values()):
        raise SourceError(f"{file.name}: {name} is {clip(config)}, wanted name -> tensor")
    return list(table.items())


def _faults(program: dict[str, Any]) -> list[str]:
    """What in the program torch would look up or evaluate, and llmc does not know. Removes notes of its origin."""
    faults: list[str] = []
    if program.get("guards_code"):
        faults.append("checks of its inputs as Python code; export it without")
    pending: list[Any] = [program]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            if "metadata" in value:
                value["metadata"] = {}
            for key, inner in value.items():
                faults += _fault(key, inner)
                pending.append(inner)
    return faults


def _fault(key: str, value: Any) -> list[str]:
    if key == "target" and not (isinstance(value, str) and _TARGET.fullmatch(value)):
        return [f"operator {clip(value)}, which llmc does not know"]
    if key == "expr_str" and not (isinstance(value, str) and is_plain_size(value)):
        return [f"size {clip(value)}, wanted sums and products of names"]
    if key in ("in_spec", "out_spec") and not _is_plain_spec(value):
        return [f"arguments arranged as {clip(value)}, wanted tuples, lists and dicts"]
    if key in ("as_custom_obj", "as_graph", "as_operator", "as_string_to_argument") and value is not None:
        return [f"an argument of kind {key[3:]}, which llmc does not know"]
    return []


def is_plain_size(text: str) -> bool:
    """Whether the text of a size calls nothing but sums, products and names of sizes.

    >>> is_plain_size("2*Symbol('s77', positive=True, integer=True)"), is_plain_size("__import__('os').getcwd()")
    (True, False)
    """
    if len(text) > 1000:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that numbers and words touch
            nodes = list(ast.walk(ast.parse(text, mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(isinstance(node, _NODES) and _is_plain_node(node) for node in nodes)


def _is_plain_node(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _CALLS
    if isinstance(node, ast.Name):
        return node.id in _CALLS or _SYMBOL.fullmatch(node.id) is not None
    if isinstance(node, ast.keyword):
        return node.arg in _ARGUMENTS
    if isinstance(node, ast.Constant):
        small = isinstance(node.value, int) and abs(node.value) < 1 << 40
        return small or (isinstance(node.value, str) and _SYMBOL.fullmatch(node.value) is not None)
    return True


def _is_plain_spec(value: Any) -> bool:
    """Whether a description of nested arguments names no type but those of Python itself."""
    if not isinstance(value, str) or len(value) > 1 << 20:
        return value in (None, "")
    types = re.findall(r'"type"\s*:\s*("[^"]*"|null|[^,}\s]+)', value)
    return all(_SPECS.fullmatch(name.strip('"')) for name in types) and "\\" not in value.replace('\\"', "")


def _packed(files: dict[str, bytes]) -> io.BytesIO:
    """An archive of these files; its sample inputs are empty, for torch would unpickle them."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as writer:
        for name, data in {**files, "data/sample_inputs/model.pt": b""}.items():
            writer.writestr(f"model/{name}", data)
    archive.seek(0)
    return archive


def _as_imported(module: tvm.IRModule, path: Path, program: dict[str, Any]) -> Imported:
    main = module["main"]
    inputs = int(main.attrs["num_input"])
    values = [np.from_dlpack(value) for value in main.attrs["params"]] if "params" in main.attrs else []
    arrays = {str(v.name): value for v, value in zip(main.params[inputs:], values, strict=True)}
    joined = _Linear(arrays)
    main = joined.visit_expr(main)
    plain = [v for v in main.params[inputs:] if str(v.name) not in joined.found]
    matrices = [v for v in main.params[inputs:] if str(v.name) in joined.found]
    params = [*main.params[:inputs], *plain, *matrices]
    step = relax.Function(params, main.body, main.ret_ty, True).with_attr("num_input", inputs)
    step = step.with_attr("global_symbol", STEP)
    names = {size: str(size.name) for v in params for size in v.ty.shape if isinstance(size, tirx.Var)}
    targets = {node["target"] for node in program["graph_module"]["graph"]["nodes"]}
    return Imported(
        clean_name(path.stem), relax.transform.DeadCodeElimination()(tvm.IRModule({STEP: step})),
        tuple(_port(str(v.name), v.ty, names) for v in main.params[:inputs]),
        tuple(_port(f"output_{i}", kind, names) for i, kind in enumerate(_outputs(main.ret_ty, path))), (),
        {str(v.name): arrays[str(v.name)] for v in plain}, {str(v.name): arrays[str(v.name)] for v in matrices},
        frozenset(), tuple(sorted(targets)), "torch.export",
    )  # fmt: skip


def _outputs(kind: Any, path: Path) -> list[Any]:
    fields = list(kind.fields) if isinstance(kind, ir.TupleType) else [kind]
    if any(not isinstance(field, relax.TensorType) or field.shape is None for field in fields):
        raise SourceError(f"{path.name}: an output that is no tensor, or whose shape depends on values")
    return fields


def _port(name: str, kind: Any, names: dict[Any, str]) -> Port:
    shape = tuple(sizes.term(sizes.simplify(size), names) for size in kind.shape)
    return Port(name, str(kind.dtype.dtype), shape)


@relax.expr_functor.mutator
class _Linear(relax.PyExprMutator):
    """x times a turned parameter -> the op `linear`, whose matrix passes give a format."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        super().__init__()
        self.arrays = arrays
        self.found: set[str] = set()

    def visit_call_(self, call: Any) -> Any:
        call = super().visit_call_(call)
        if not call.op.same_as(ir.Op.get("relax.matmul")) or call.args[0].ty.ndim != 2:
            return call
        turned = self.lookup_binding(call.args[1]) if isinstance(call.args[1], relax.Var) else None
        if not isinstance(turned, relax.Call) or not turned.op.same_as(ir.Op.get("relax.permute_dims")):
            return call
        matrix = turned.args[0]
        array = self.arrays.get(str(getattr(matrix, "name", "")))
        if array is None or array.ndim != 2 or array.dtype != np.float32 or array.size < LEAST_WEIGHT:
            return call
        self.found.add(str(matrix.name))
        return ops.call("linear", [call.args[0], matrix], {})
