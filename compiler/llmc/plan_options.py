"""What `llmc plan` is given: the model in any form, formats, devices; checked before any work."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from llmc.console import words_for_bytes


@dataclass(frozen=True)
class Planned:
    """A model to plan for: what `llmc.passes.plan` wants of it, and how it was named."""

    name: str
    model: Any  # llmc.passes.plan.held.Model
    quant: str
    weight_bytes: int

    @property
    def words(self) -> str:
        """One line about it."""
        spec = self.model.spec
        return (
            f"{spec.name or self.name}: {spec.sizes.layers} layers, width {spec.sizes.hidden}, {self.quant} weights "
            f"({words_for_bytes(self.weight_bytes)}), {self.model.kv} keys and values"
        )


def open_planned(source: str, quant: str, kv: str, revision: str | None = None) -> Planned:
    """The model in an artifact, a spec file, or what `llmc compile` takes. Weights are not read."""
    from llmc.compiler.driver.recipe import keep, uniform
    from llmc.compiler.driver.request import read_spec
    from llmc.compiler.spec import from_dict
    from llmc.frontends.source import open_model
    from llmc.passes.plan.held import Model

    path = Path(source)
    if (path / "manifest.json").is_file():
        manifest = _manifest(path)
        if quant != "auto":
            raise click.UsageError("--quant: an artifact has its formats; give the model instead of it")
        spec, formats, word = (
            from_dict(manifest["spec"]),
            manifest["quantization"]["formats"],
            manifest["quantization"]["format"],
        )
        kv = manifest["kv"]["dtype"] if kv == "auto" else kv
    elif path.suffix == ".toml" and path.is_file():
        spec = read_spec(path)
        word = "q8" if quant == "auto" else quant
        formats = uniform(spec, word)
    else:
        if revision is not None:
            from llmc.frontends.hub import with_revision

            source = with_revision(source, revision)
        with open_model(source) as opened:
            spec = opened.spec
            formats = keep(opened) if quant == "auto" else uniform(spec, quant)
        word = quant if quant != "auto" else "kept" if len(set(formats.values())) > 1 else next(iter(formats.values()))
    if kv == "auto":
        kv = "f32" if set(formats.values()) == {"f32"} else "bf16"
    model = Model(spec, formats, kv)
    return Planned(path.name, model, word, _weight_bytes(model))


def _manifest(path: Path) -> dict[str, Any]:
    import llmc.runtime

    manifest = llmc.runtime.inspect(path)
    if manifest["task"] == "graph":
        raise click.ClickException(f"{path}: an exported graph; only models with layers and a cache can be planned for")
    return manifest


def _weight_bytes(model: Any) -> int:
    """Of one device that has all."""
    from llmc.compiler.placement import parse_placement

    held = model.held(parse_placement("0"))[0]
    layers = sum(count * sum(each.bytes for each in model.tensors(kind, held.cut)) for kind, count in held.layers)
    return int(layers + sum(each.bytes for each in held.outer))


def open_devices(path: str) -> Any:
    """The Devices of a file."""
    from llmc.compiler.text_file import read_text
    from llmc.passes.plan.devices import read_devices

    return read_devices(read_text(Path(path), "the devices"), path)


def as_json(value: Any) -> str:
    """One JSON document without what JSON has no word for."""
    return json.dumps(value, indent=2, allow_nan=False)
