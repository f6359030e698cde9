"""`llmc inspect` and `llmc verify`: what is in an artifact, and whether it is intact."""

from __future__ import annotations

from typing import Any

import click

from llmc.console import json_option, print_json, print_table, progress_bars, words_for_bytes, words_for_loss


@click.command(
    "inspect",
    short_help="Show what an artifact holds.",
    epilog="""\b
Examples:
  llmc inspect smollm2.llmc
  llmc inspect smollm2.llmc --json""",
)
@click.argument("artifact", metavar="NAME.llmc")
@json_option
def inspect_command(artifact: str, as_json: bool) -> None:
    """Show the manifest of NAME.llmc. Nothing of the artifact is loaded or executed."""
    import llmc.runtime

    manifest = llmc.runtime.inspect(artifact)
    if as_json:
        print_json(manifest)
        return
    print_table(_summary(manifest))
    click.echo()
    if "devices" in manifest:
        print_table(_devices(manifest["devices"]["ranks"]), columns=_DEVICE_COLUMNS)
        click.echo()
    files = sorted(manifest["files"].items())
    print_table(
        [(name, words_for_bytes(f["bytes"]), f["sha256"][:16]) for name, f in files],
        columns=("file", "size", "sha256"),
    )


_DEVICE_COLUMNS = ("rank", "stage", "device", "layers", "kv heads", "weights", "cache a token", "library", "memory")


def _devices(ranks: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return what each device holds, and whether that is in the host's memory, for devices that are too small."""
    return [
        (
            str(number),
            str(each["stage"]),
            each["device"],
            _ranges(each["layers"]),
            str(each["kv_heads"]),
            words_for_bytes(each["weight_bytes"]),
            words_for_bytes(each["kv_token_bytes"]),
            ", ".join(variant["file"] for variant in each["variants"]),
            "host" if each["on_host"] else "own",
        )
        for number, each in enumerate(ranks)
    ]


def _ranges(numbers: list[int]) -> str:
    """Return ascending numbers as people write them.

    >>> _ranges([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1] = [found[-1][0], number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, each)) for each in found)


def _placement(devices: dict[str, Any]) -> str:
    """Return the devices, and how the model is divided among them."""
    stages = [rank["stage"] for rank in devices["ranks"]]
    ways = [way for way, is_so in (("layer", stages[-1] > 0), ("tensor", len(set(stages)) < len(stages))) if is_so]
    return f"{len(stages)}: {devices['placement']}, by {' and by '.join(ways)}"


def _summary(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the table."""
    return _graph_summary(manifest) if manifest["task"] == "graph" else _model_summary(manifest)


def _graph_summary(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    from llmc.runtime.loading.graph_manifest import words_of

    quantization = manifest["quantization"]
    ports = [
        (kind, f"{port['name']} {port['dtype']} [{', '.join(map(words_of, port['shape']))}]")
        for kind in ("inputs", "outputs")
        for port in manifest[kind]
    ]
    relations = {"equal": "is", "at least": "is at least"}
    conditions = [
        ("condition", f"{words_of(c['left'])} {relations[c['relation']]} {words_of(c['right'])}")
        for c in manifest["conditions"]
    ]
    return [
        ("name", str(manifest["name"])),
        ("format", str(manifest["format"])),
        ("made to", f"compute a graph of {manifest['source']}"),
        *((kind.removesuffix("s"), text) for kind, text in ports),
        *conditions,
        ("operators", ", ".join(manifest["operators"])),
        ("weights", f"{quantization['format']}, {quantization['bits_per_weight']:.2f} bits each"),
        *_activations(quantization),
        *_made(manifest),
    ]


def _made(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    compiler = ", ".join(f"{name} {version}" for name, version in manifest["compiler"].items())
    return [
        ("variants", _variants(manifest)),
        ("runs here", _fit(manifest["machine"])),
        ("compiled by", compiler),
        ("size", words_for_bytes(manifest["bytes"])),
    ]


def _activations(quantization: dict[str, Any]) -> list[tuple[str, str]]:
    """What weights are multiplied with, where that was asked for."""
    asked = quantization.get("activations", "auto")
    return [] if asked == "auto" else [("activations", asked)]


def _model_summary(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    quantization, kv = manifest["quantization"], manifest["kv"]
    counts = ", ".join(f"{n} {name}" for name, n in sorted(quantization["tensors"].items()))
    sizes = manifest["spec"]["sizes"]
    compiler = ", ".join(f"{name} {version}" for name, version in manifest["compiler"].items())
    return [
        ("name", str(manifest["name"])),
        ("format", str(manifest["format"])),
        ("made to", _task(manifest)),
        ("blocks", _blocks(manifest["spec"])),
        ("sizes", ", ".join(f"{name} {value}" for name, value in sizes.items())),
        *_translator(manifest),
        ("weights", f"{quantization['format']}, {quantization['bits_per_weight']:.2f} bits each"),
        *_activations(quantization),
        *([("expected loss", words_for_loss(quantization["loss"]))] if "loss" in quantization else []),
        ("tensors", counts),
        ("kv cache", f"{kv['dtype']}, pages of {kv['page_tokens']} tokens, {_token_bytes(kv)}"),
        *([("devices", _placement(manifest["devices"]))] if "devices" in manifest else []),
        ("variants", _variants(manifest)),
        ("runs here", _fit(manifest["machine"])),
        *_exchange(manifest["machine"]),
        ("chat template", "yes" if manifest["chat_template"] else "no"),
        ("compiled by", compiler),
        ("size", words_for_bytes(manifest["bytes"])),
    ]


def _task(manifest: dict[str, Any]) -> str:
    pooling = manifest["pooling"]
    if pooling is None:
        return str(manifest["task"])
    return f"{manifest['task']}, {pooling['kind']} of the tokens{', length 1' if pooling['normalize'] else ''}"


def _translator(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what only a model with an encoder has."""
    if manifest["task"] != "translate":
        return []
    encoder = manifest["spec"]["encoder"]
    table = ", an embedding of its own" if encoder["own_embedding"] else ""
    rows = {
        "languages": ", ".join(sorted(manifest["languages"])),
        "translates": ", ".join(sorted(manifest["prefixes"])),
    }
    return [
        ("encoder", f"layers {encoder['layers']}, ffn {encoder['ffn']}{table}"),
        *((name, text) for name, text in rows.items() if text),
    ]


def _token_bytes(kv: dict[str, Any]) -> str:
    """Return what a token takes, in words: for good, and in layers that see the last tokens only."""
    from llmc.runtime.loading.manifest import KvLayout

    one = KvLayout(1, kv["kv_heads"], kv["head_dim"], kv["dtype"]).token_bytes
    groups = kv["groups"] or [{"layers": range(kv["layers"]), "window": 0}]
    return ", ".join(
        f"{words_for_bytes(len(group['layers']) * one)} a token"
        + (f" of the last {group['window']}" if group["window"] else "")
        for group in groups
    )


def _variants(manifest: dict[str, Any]) -> str:
    """Return the variants, best first, and what this machine lacks for each."""
    missing = manifest["machine"]["missing"]
    lacks = {name: f"; lacks {' '.join(flags)}" if flags else "" for name, flags in missing.items()}
    ranks = manifest["devices"]["ranks"] if "devices" in manifest else [manifest]
    variants = {variant["name"]: variant for each in ranks for variant in each["variants"]}
    return ", ".join(f"{name} ({v['arch']}{lacks[name]})" for name, v in variants.items())


def _fit(machine: dict[str, Any]) -> str:
    from llmc.runtime.loading.cpu import forced_variant

    if machine["variant"] is not None:
        return f"yes, as {machine['variant']}"
    fits = [name for name, flags in machine["missing"].items() if not flags]
    if fits and forced_variant():
        return f"no: LLMC_VARIANT names none of {', '.join(fits)}"
    lacking = "; ".join(f"{name} needs {', '.join(flags)}" for name, flags in machine["missing"].items() if flags)
    return f"no: {lacking}"


def _exchange(machine: dict[str, Any]) -> list[tuple[str, str]]:
    """Return how GPUs that share layers exchange what they have, where there are any."""
    if "nccl" not in machine:
        return []
    slow = "through the host's memory (pip install nvidia-nccl-cu13: from GPU to GPU)"
    return [("exchange", "from GPU to GPU, by NCCL" if machine["nccl"] else slow)]


def _blocks(spec: dict[str, Any]) -> str:
    """Return the kind of every block, such as `attention gqa, mlp gated`."""
    kinds = [
        f"{name} {part['kind']}"
        for name, part in spec.items()
        if isinstance(part, dict) and isinstance(part.get("kind"), str)
    ]
    convolution = spec.get("convolution")
    if convolution:
        kinds.append(f"convolutions in {len(convolution['layers'])} of {spec['sizes']['layers']} layers")
    return ", ".join(kinds)


@click.command(
    short_help="Check every byte of an artifact.",
    epilog="""\b
Examples:
  llmc verify smollm2.llmc""",
)
@click.argument("artifact", metavar="NAME.llmc")
@json_option
def verify(artifact: str, as_json: bool) -> None:
    """Hash every file of NAME.llmc and compare with the manifest; exit 1 at the first damage."""
    import llmc.runtime

    with progress_bars() as progress:
        llmc.runtime.verify(artifact, progress=progress)
    manifest = llmc.runtime.inspect(artifact)
    files, size = len(manifest["files"]) + 1, manifest["bytes"]  # the manifest is a file too
    if as_json:
        print_json({"path": artifact, "intact": True, "files": files, "bytes": size})
        return
    click.echo(f"{artifact}: intact ({files} files, {words_for_bytes(size)})")
