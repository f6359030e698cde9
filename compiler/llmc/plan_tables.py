"""What `llmc plan` prints: tables for people, JSON for scripts."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from llmc.console import print_json, print_table

_SHOWN = 12  # strategies, unless all are asked for


def show_plan(planned: Any, chosen: Any, work: Any, file: str, options: dict[str, Any], as_json: bool) -> None:
    """The strategies, best first, then what was refused and why, and the command to use."""
    from llmc.passes.plan.strategies import rank

    tried, best, goal = chosen.strategies, chosen.best, options["goal"]
    fitting = sorted((each for each in tried if not each.refused), key=lambda each: rank(each, goal))
    refused = [each for each in tried if each.refused]
    command = compile_line(planned, best, options)
    if as_json:
        print_json(
            {
                "model": planned.name, "quant": planned.quant, "kv": planned.model.kv, "goal": goal,
                "workload": asdict(work), "devices": file, "best": _record(best, chosen), "compile": command,
                "strategies": [_record(each, chosen) for each in (*fitting, *refused)],
            }
        )  # fmt: skip
        return
    click.echo(planned.words)
    click.echo(
        f"{work.queries} queries of {work.prompt_tokens} + {work.new_tokens} tokens, best for {goal}; predicted, not "
        "measured\n"
    )
    shown = fitting if options["everything"] else fitting[:_SHOWN]
    print_table(
        [_cells(each, each is best, chosen) for each in shown],
        columns=("  devices", "divided", "copies", "ms/token", "first ms", "tok/s, all", "GB a device", "split"),
    )
    if len(fitting) > len(shown):
        click.echo(f"... and {len(fitting) - len(shown)} more that fit (--all)")
    _show_refused(refused, options["everything"])
    if chosen.offload is not None:
        click.echo(f"\nhost offload: nothing fits without; {chosen.offload.words}")
    click.echo(f"\n* {reason(best, goal)}\n{command}")


def compile_line(planned: Any, best: Any, options: dict[str, Any]) -> str:
    """The command that compiles for the placement that was picked."""
    words = ["llmc", "compile", planned.name, "-o", "NAME.llmc"]
    if options["quant"] != "auto":
        words += ["--quant", options["quant"]]
    if options["kv"] != "auto":
        words += ["--kv", options["kv"]]
    kinds = {device.kind for stage in best.placement.stages for device in stage}
    if "cuda" in kinds:  # of which chip, a file of devices does not say
        words += ["--target", "cuda:sm_XX" + (",cpu" if "cpu" in kinds else "")]
    line = shlex.join(words)
    if best.count > 1:
        line += f' --devices "{best.devices}"'
    return line + (f" --split {best.split}" if best.split else "")


def reason(best: Any, goal: str) -> str:
    """Why this one, in words."""
    from llmc.passes.plan.strategies import name_of

    found = best.prediction
    what = f"{found.token_s * 1e3:.3g} ms a token" if goal == "latency" else f"{_rate(best.tokens_per_s)} tokens/s"
    times = f", {best.replicas} times side by side" if best.replicas > 1 else ""
    return f"{name_of(best.placement)}{times}: {'quickest' if goal == 'latency' else 'most'}, {what}"


def _divided(strategy: Any) -> str:
    kind, stages = strategy.placement.kind, strategy.placement.stages
    if kind in ("whole", "layer", "tensor"):
        return {"whole": "whole", "layer": f"by layer, {len(stages)}", "tensor": f"by tensor, {len(stages[0])}"}[kind]
    sizes = sorted({len(stage) for stage in stages})
    return f"hybrid, {len(stages)} x {'/'.join(map(str, sizes))}"


def _cells(strategy: Any, best: bool, chosen: Any) -> tuple[str, ...]:
    from llmc.passes.plan.strategies import name_of

    found = strategy.prediction
    fullest = max(each.needs for each in found.memory)
    split = strategy.split or ""
    return (
        f"{'*' if best else ' '} {name_of(strategy.placement)}", _divided(strategy), str(strategy.replicas),
        f"{found.token_s * 1e3:.3g}", f"{found.first_token_s * 1e3:.3g}", _rate(strategy.tokens_per_s),
        f"{fullest / 1e9:.2f}", split if len(split) <= 24 else split[:21] + "...",
    )  # fmt: skip


def _rate(value: float) -> str:
    """A rate in at least three digits.

    >>> _rate(240112.3), _rate(23.41)
    ('240,112', '23.4')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _show_refused(refused: list[Any], everything: bool) -> None:
    from llmc.passes.plan.strategies import name_of

    reasons: dict[str, list[str]] = {}
    for each in refused:
        reasons.setdefault(each.refused, []).append(name_of(each.placement))
    if not reasons:
        return
    click.echo("\nrefused:")
    most = len(reasons) if everything else 6
    for why, names in list(reasons.items())[:most]:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        click.echo(f"  {names[0]}{more}: {why}")
    if len(reasons) > most:
        click.echo(f"  ... and {len(reasons) - most} other reasons (--all)")


def _record(strategy: Any, chosen: Any) -> dict[str, Any]:
    found = strategy.prediction
    record = {
        "devices": strategy.devices, "split": strategy.split, "kind": strategy.placement.kind,
        "replicas": strategy.replicas, "refused": strategy.refused or None,
    }  # fmt: skip
    if found is None:
        return record
    offload = chosen.offload
    return record | {
        "token_s": found.token_s, "first_token_s": found.first_token_s, "tokens_per_s": strategy.tokens_per_s,
        "micro_batches": found.micro_batches, "stages": [asdict(each) for each in found.stages],
        "memory": [asdict(each) | {"needs": each.needs} for each in found.memory],
        "offload": None if offload is None or offload.strategy is not strategy else {
            "host": offload.host, "layers": offload.layers, "pages": offload.pages, "pages_bytes": offload.pages_bytes,
        },
    }  # fmt: skip


def show_apart(planned: Any, found: Any, work: Any, targets: Any, as_json: bool) -> None:
    """Prefill and decode on devices of their own, against all of it on all."""
    sides = [
        ("reading", "prompts", found.reading),
        ("answering", "answers", found.answering),
        ("together", "both", found.together),
    ]
    if as_json:
        plain = {
            name: {"devices": str(side.placement), "instances": side.count, "queries_per_s": side.rate}
            for name, _, side in sides
        }
        print_json(
            plain | {
                "goodput": found.goodput, "together_goodput": found.together_goodput, "apart": found.apart,
                "transfer_s": found.transfer_s, "transfer_bytes": found.transfer_bytes, "targets": asdict(targets),
                "workload": asdict(work),
            }
        )  # fmt: skip
        return
    from llmc.passes.plan.strategies import name_of

    click.echo(planned.words)
    click.echo(
        f"queries of {work.prompt_tokens} + {work.new_tokens} tokens; nine tenths of them within "
        f"{targets.first_s * 1e3:g} ms to the first token\nand {targets.token_s * 1e3:g} ms for each other one; "
        "simulated\n"
    )
    rows = [
        (what, str(side.count), name_of(side.placement), str(side.devices), f"{side.rate:.4g}")
        for _, what, side in sides
    ]
    print_table(rows, columns=("does", "instances", "each like", "devices", "queries/s, each"))
    click.echo(
        f"\napart:    {found.goodput:.4g} queries/s, keys and values of a prompt ({found.transfer_bytes / 1e6:.4g} MB) "
        f"sent in {found.transfer_s * 1e3:.3g} ms\ntogether: {found.together_goodput:.4g} queries/s"
    )
    better, ratio = (
        ("apart", found.goodput / max(found.together_goodput, 1e-9))
        if found.apart
        else ("together", found.together_goodput / max(found.goodput, 1e-9))
    )
    click.echo(f"\n* {better}: {ratio:.2f} times as many")


def show_ring(planned: Any, found: Any, work: Any, as_json: bool) -> None:
    """Ways round a ring."""
    if as_json:
        rows = [asdict(each) | {"total_s": each.total_s, "best": each is found.best} for each in found.plans]
        print_json({"alone_s": found.alone_s, "plans": rows, "workload": asdict(work)})
        return
    click.echo(planned.words)
    click.echo(
        f"one prompt of {work.prompt_tokens} tokens; one device alone takes {found.alone_s:.4g} s; predicted, not "
        "measured\n"
    )
    print_table(
        [_ring_cells(each, found) for each in found.plans],
        columns=(
            "  devices",
            "goes round",
            "ring step ms",
            "sends ms",
            "hidden",
            "attention s",
            "rest s",
            "total s",
            "GB",
        ),
    )
    best = found.best
    click.echo(f"\n* {best.way} on {best.devices} devices: {found.alone_s / best.total_s:.2f} times one device's speed")


def _ring_cells(each: Any, found: Any) -> tuple[str, ...]:
    fits = "" if not each.memory.lacks else f" of {each.memory.has / 1e9:.2f}: too few"
    return (
        f"{'*' if each is found.best else ' '} {each.devices}", each.way, f"{each.step_s * 1e3:.3g}",
        f"{each.send_s * 1e3:.3g}", f"{each.hidden:.0%}", f"{each.attention_s:.4g}", f"{each.rest_s:.4g}",
        f"{each.total_s:.4g}", f"{each.memory.needs / 1e9:.2f}{fits}",
    )  # fmt: skip


def show_experts(found: Any, output: str | None, as_json: bool) -> None:
    """Where experts go, beside the usual ways."""
    from llmc.passes.plan.experts import device_names

    named = {"best": found.best, "in_order": found.in_order, "in_turn": found.in_turn}
    record = {
        name: {"seconds": each.seconds, "imbalance": each.imbalance, "crossing": each.crossing}
        for name, each in named.items()
    }
    experts = device_names(found.best, found.devices)
    if output is not None:
        import json

        Path(output).write_text(json.dumps({"experts": experts}, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print_json(record | {"experts": experts})
        return
    words = {"best": "found", "in_order": "in order, as llmc compile", "in_turn": "dealt out in turn"}
    print_table(
        [
            (f"{'*' if name == 'best' else ' '} {words[name]}", f"{each.imbalance:.3f}", f"{each.crossing:.1%}",
             f"{each.seconds * 1e3:.4g}")
            for name, each in named.items()
        ],
        columns=("  experts", "fullest/average", "change machines", "ms of the trace"),
    )  # fmt: skip
    layers, count = found.best.of.shape
    where = f"; written to {output}" if output else " (-o FILE writes which is where)"
    click.echo(f"\n* {layers} layers of {count} experts on {len(found.devices)} devices{where}")


def show_measured(output: str, facts: dict[str, Any], as_json: bool) -> None:
    """What this machine does."""
    if as_json:
        print_json({"path": output, **facts})
        return
    print_table([("written", output), *((name, text) for name, text in facts["words"])])
