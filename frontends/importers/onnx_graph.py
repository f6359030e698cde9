"""An ONNX graph -> Relax: operators in order, each by what is known of it, by llmc's converter, or by TVM's.

Shapes are computed while reading, over the named dynamic sizes of the inputs; one that depends on values is refused.
"""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tvm import relax, tirx

from llmc.compiler.errors import LlmcError, SourceError
from llmc.compiler.spec.fields import clip
from llmc.frontends.files.onnx_file import DTYPES, TensorReader, need_onnx, read_onnx
from llmc.frontends.importers import onnx_constants, onnx_integers, onnx_ops, sizes
from llmc.frontends.importers.emitter import Emitter, with_weights
from llmc.frontends.importers.imported import STEP, Imported, Port
from llmc.frontends.model_name import clean_name

OPERATORS = {**onnx_ops.OPERATORS, **onnx_integers.OPERATORS}
_STANDARD = ("", "ai.onnx")
_LEAST_OPSET = 9  # older ones write broadcasting and shapes in other ways
MOST_FOLDED = 1 << 28  # values of a constant that is computed here


def import_onnx(path: Path) -> Imported:
    """The graph in a file. Raises SourceError, naming every operator that llmc does not know."""
    model = read_onnx(path)
    if model.functions:
        model = _inlined(model, path)
    known = _tvm_operators()
    opset = _opset(model, path)
    unknown = sorted({_named(node) for node in model.graph.node if not _is_known(node, known)})
    if unknown:
        raise SourceError(f"{path.name}: operators that llmc does not know: {', '.join(unknown)}")
    return _Reader(path, model, opset, known).read()


def _inlined(model: Any, path: Path) -> Any:
    from onnx import inliner

    try:
        return inliner.inline_local_functions(model)
    except Exception as error:
        raise SourceError(f"{path.name}: its functions cannot be put in place: {str(error)[:200]}") from None


def _opset(model: Any, path: Path) -> int:
    versions = [entry.version for entry in model.opset_import if entry.domain in _STANDARD]
    if len(versions) != 1 or versions[0] < _LEAST_OPSET:
        raise SourceError(f"{path.name}: operators of version {clip(versions)}, wanted one of {_LEAST_OPSET} or later")
    return int(versions[0])


def _tvm_operators() -> dict[str, Any]:
    need_onnx()
    from tvm.relax.frontend.onnx import onnx_frontend  # the version of TVM is pinned, so this name stays

    return dict(onnx_frontend._get_convert_map())


def _is_known(node: Any, known: Mapping[str, Any]) -> bool:
    listed = node.op_type in OPERATORS or node.op_type in known or node.op_type in ("Constant", "If")
    return node.domain in _STANDARD and listed


def _named(node: Any) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain not in _STANDARD else str(node.op_type)


class _Reader:
    def __init__(self, path: Path, model: Any, opset: int, known: Mapping[str, Any]) -> None:
        self.path, self.graph, self.opset, self.known = path, model.graph, opset, known
        self.tensors = TensorReader(path)
        self.values: dict[str, Any] = {}  # name of the file -> array or expression
        self.symbols: dict[str, Any] = {}  # name of a dynamic size -> variable

    def read(self) -> Imported:
        stored = {initializer.name for initializer in self.graph.initializer}
        inputs = tuple(self._input(entry) for entry in self.graph.input if entry.name not in stored)
        named = [entry.name for entry in self.graph.output]
        if not inputs or not named or len(set(named)) != len(named):
            raise SourceError(
                f"{self.path.name}: {len(inputs)} inputs and outputs {clip(named)}, wanted each named once"
            )
        builder = relax.BlockBuilder()
        to = self.to = Emitter(builder)
        self._initializers(self.graph)
        variables = [self.values[port.name] for port in inputs]
        try:
            outputs = self._body(builder, variables)
        except BaseException:
            builder._end_block()  # else the builder writes a warning of its own that it was left open
            raise
        names = self._names()
        conditions = [(sizes.term(a, names), how, sizes.term(b, names)) for a, how, b in to.conditions.values()]
        return Imported(
            clean_name(self.path.stem), with_weights(builder.get(), to), inputs, outputs, tuple(conditions),
            {name: values for name, (_, values) in to.weights.items()},
            {name: values for name, (_, values) in to.matrices.items()},
            frozenset(to.exact), tuple(sorted({_named(node) for node in self.graph.node})), "onnx",
        )  # fmt: skip

    def _body(self, builder: Any, variables: list[Any]) -> tuple[Port, ...]:
        """Build the function; the outputs."""
        with builder.function(STEP, variables, attrs={"num_input": len(variables)}):
            with builder.dataflow():
                self._nodes(self.graph, 0)
                results = [self._output(entry) for entry in self.graph.output]
                result = builder.emit_output(relax.Tuple(results))
            builder.emit_func_output(result)
        return tuple(self._port(entry.name, value) for entry, value in zip(self.graph.output, results, strict=True))

    def _input(self, entry: Any) -> Port:
        kind = entry.type.tensor_type
        if not entry.type.HasField("tensor_type") or kind.elem_type not in DTYPES or not kind.HasField("shape"):
            raise SourceError(f"{self.path.name}: input {clip(entry.name)} is not a tensor of a known type and rank")
        dtype = DTYPES[kind.elem_type]
        shape: list[Any] = []
        named: list[Any] = []
        for number, size in enumerate(kind.shape.dim):
            if size.HasField("dim_value"):
                if not 0 < size.dim_value < 1 << 31:
                    raise SourceError(f"{self.path.name}: input {clip(entry.name)} has size {size.dim_value}")
                shape.append(int(size.dim_value))
                named.append(int(size.dim_value))
            else:
                name = size.dim_param or f"{entry.name}_{number}"
                shape.append(self.symbols.setdefault(name, tirx.Var(_identifier(name), "int64")))
                named.append(name)
        if entry.name in self.values:
            raise SourceError(f"{self.path.name}: input {clip(entry.name)} twice")
        self.values[entry.name] = relax.Var(_identifier(entry.name), relax.TensorType(shape, dtype))
        return Port(entry.name, dtype, tuple(named))

    def _initializers(self, graph: Any) -> None:
        if graph.sparse_initializer:
            raise SourceError(f"{self.path.name}: sparse tensors; save the model with dense ones")
        for tensor in graph.initializer:
            if not tensor.name or tensor.name in self.values:
                raise SourceError(f"{self.path.name}: tensor {clip(tensor.name)} has no name, or one that is taken")
            array = self.tensors.array(tensor)
            self.values[tensor.name] = array
            self.to.names[id(array)] = tensor.name

    def _nodes(self, graph: Any, depth: int) -> None:
        for node in graph.node:
            where = f"{self.path.name}: {_named(node)} {clip(node.name or (node.output[0] if node.output else ''))}"
            absent = [name for name in node.input if name and name not in self.values]
            if absent:
                raise SourceError(
                    f"{where}: reads {clip(absent)} before anything gives it; the graph is no order of work"
                )
            inputs = [self.values[name] if name else None for name in node.input]
            attrs = self._attrs(node, where)
            if node.op_type == "If":
                outputs = self._branch(inputs[0], attrs, where, depth)
            else:
                outputs = self._convert(node, inputs, attrs, where)
            for name, value in zip(node.output, outputs, strict=False):
                if name in self.values:
                    raise SourceError(f"{where}: gives {clip(name)}, which is given already")
                if name:
                    self.values[name] = value

    def _attrs(self, node: Any, where: str) -> dict[str, Any]:
        attrs: dict[str, Any] = {}
        for attribute in node.attribute:
            field = {1: "f", 2: "i", 3: "s", 4: "t", 5: "g", 6: "floats", 7: "ints", 8: "strings"}.get(attribute.type)
            if field is None or attribute.name in attrs or attribute.ref_attr_name:
                raise SourceError(f"{where}: attribute {clip(attribute.name)} twice, or of a kind llmc does not know")
            value = getattr(attribute, field)
            if field == "t":
                value = self.tensors.array(value)
            attrs[attribute.name] = tuple(value) if field.endswith("s") and field != "s" else value
        if node.op_type == "Cast":
            if attrs.get("to") not in DTYPES:
                raise SourceError(f"{where}: to type number {attrs.get('to')}, which llmc does not know")
            attrs["to"] = DTYPES[attrs["to"]]
        return attrs

    def _branch(self, condition: Any, attrs: dict[str, Any], where: str, depth: int) -> list[Any]:
        """One of the two graphs, where the condition is known."""
        known = isinstance(condition, np.ndarray) and condition.dtype == bool and condition.size == 1
        if not known or depth > 8 or "then_branch" not in attrs or "else_branch" not in attrs:
            raise SourceError(f"{where}: depends on values; llmc compiles one order of work for all inputs")
        graph = attrs["then_branch" if condition.reshape(-1)[0] else "else_branch"]
        self._initializers(graph)
        self._nodes(graph, depth + 1)
        return [self.values[entry.name] for entry in graph.output]

    def _convert(self, node: Any, inputs: list[Any], attrs: dict[str, Any], where: str) -> list[Any]:
        op = node.op_type
        try:
            if op == "Constant":
                return [self._constant(attrs, where)]
            arrays = all(x is None or isinstance(x, np.ndarray) for x in inputs)
            if arrays and inputs and sum(x.size for x in inputs if x is not None) < MOST_FOLDED:
                known = onnx_constants.fold(op, inputs, attrs)
                if known is not None:
                    return [known]
            if op in OPERATORS:
                return OPERATORS[op](self.to, inputs, attrs)
            return self._by_tvm(node, inputs, where)
        except LlmcError as error:
            raise SourceError(f"{where}: {error}") from None
        except Exception as error:  # whatever TVM raises for a shape or an attribute it does not take
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise SourceError(f"{where}: cannot be converted: {reason[-1][:200]}") from error

    def _constant(self, attrs: dict[str, Any], where: str) -> Any:
        kinds = {"value_int": np.int64, "value_ints": np.int64, "value_float": np.float32, "value_floats": np.float32}
        if len(attrs) != 1 or next(iter(attrs)) not in {"value", *kinds}:
            raise SourceError(f"{where}: a constant of {clip(list(attrs))}")
        ((name, value),) = attrs.items()
        return value if name == "value" else np.array(value, kinds[name])

    def _by_tvm(self, node: Any, inputs: list[Any], where: str) -> list[Any]:
        """TVM's converter of the operator: it wants small arrays as constants and sizes as a shape."""
        from tvm.relax.frontend.onnx import onnx_frontend

        given = onnx_frontend.onnx_input()
        for value in inputs:
            given.append(None if value is None else self._for_tvm(value))
        importer = onnx_frontend.ONNXGraphImporter({}, {})
        attrs = importer._parse_attr(node.attribute)
        attrs["tvm_custom"] = {"name": node.name, "num_outputs": len(node.output)}
        function = self.known[node.op_type].get_converter(self.opset)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            result = function(self.to.builder, given, attrs, [{}, {}])
        if isinstance(result, (relax.Tuple, list, tuple)):
            parts = list(result.fields if isinstance(result, relax.Tuple) else result)
        else:
            variable = self.to.emit(result)
            whole = isinstance(variable.ty, relax.TupleType)
            parts = [relax.TupleGetItem(variable, i) for i in range(len(variable.ty.fields))] if whole else [variable]
        return [self._shaped(part if isinstance(part, relax.Var) else self.to.emit(part), where) for part in parts]

    def _for_tvm(self, value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.dtype == object and value.ndim == 1:
            return relax.ShapeExpr([sizes._expr(size) for size in value])
        return self.to.tensor(value)

    def _shaped(self, value: Any, where: str) -> Any:
        shape = value.ty.shape if isinstance(value.ty, relax.TensorType) else None
        own = set(self.symbols.values())
        if shape is None or not all(sizes.symbols(size) <= own for size in shape):
            raise SourceError(f"{where}: the shape of what it gives depends on values")
        return value

    def _output(self, entry: Any) -> Any:
        if entry.name not in self.values:
            raise SourceError(f"{self.path.name}: output {clip(entry.name)} is given by nothing")
        return self.to.tensor(self.values[entry.name])

    def _port(self, name: str, value: Any) -> Port:
        shape = tuple(sizes.term(size, self._names()) for size in self.to.shape(value))
        return Port(name, str(value.ty.dtype.dtype), shape)

    def _names(self) -> dict[Any, str]:
        return {variable: name for name, variable in self.symbols.items()}


def _identifier(name: str) -> str:
    plain = re.sub(r"[^0-9A-Za-z_]", "_", name)[:60]
    return plain if plain[:1].isalpha() else f"v_{plain}"
