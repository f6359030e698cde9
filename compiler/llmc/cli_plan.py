"""`llmc plan`: how a model had best be divided over devices, and what that would give, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llmc.cli_compile import KV_KINDS, QUANTS
from llmc.console import json_option, need_compiler


@click.command(
    short_help="Choose how to divide a model over devices.",
    epilog="""\b
Examples:
  llmc plan model.gguf --devices two_cores.toml
  llmc plan ./llama-folder --devices gpus.toml --quant q8 --queries 64 --for throughput
  llmc plan model.toml --devices cluster.toml --first-ms 200 --token-ms 20
  llmc plan moe.toml --devices gpus.toml --routing trace.npz
  llmc plan model.toml --devices gpus.toml --ring --prompt-tokens 100000
  llmc plan --measure -o here.toml --artifact small.llmc --artifact large.llmc

\b
docs/plan.md says what the file of devices holds, what is computed from it, and how near that comes.""",
)
@click.argument("model", metavar="MODEL", required=False)
@click.option("--devices", metavar="FILE.toml", help="What devices there are, and the links between them.")
@click.option(
    "--quant", type=click.Choice(QUANTS), metavar="FORMAT", default="auto", show_default=True,
    help="How weights are stored; auto as `llmc compile` has it, q8 for a spec without weights.",
)  # fmt: skip
@click.option(
    "--kv", type=click.Choice(KV_KINDS), default="auto", show_default=True, help="How keys and values are stored."
)
@click.option("--prompt-tokens", type=click.IntRange(1, 1 << 24), default=512, show_default=True, metavar="N")
@click.option("--new-tokens", type=click.IntRange(1, 1 << 24), default=128, show_default=True, metavar="N")
@click.option(
    "--queries", type=click.IntRange(1, 1 << 20), default=8, show_default=True, metavar="N", help="Queries at once."
)
@click.option(
    "--for", "goal", type=click.Choice(["latency", "throughput"]), default="latency", show_default=True,
    help="latency: the quickest token of one query; throughput: most tokens of all.",
)  # fmt: skip
@click.option(
    "--micro-batches", type=click.IntRange(1, 4096), metavar="N",
    help="Groups of queries that stages work on in turn; 1: stages wait for one another (default: as many as stages).",
)  # fmt: skip
@click.option("--all", "everything", is_flag=True, help="Show every division that was tried, not the best twelve.")
@click.option("--first-ms", type=float, metavar="MS", help="Prefill and decode apart: time to the first token.")
@click.option("--token-ms", type=float, metavar="MS", help="Prefill and decode apart: time for each other token.")
@click.option("--routing", metavar="FILE", help="Place experts by where tokens went: JSON or .npz (docs/plan.md).")
@click.option("--ring", is_flag=True, help="Read one long prompt on devices in a ring.")
@click.option("--measure", is_flag=True, help="Measure this machine and write its devices to the file of -o.")
@click.option("-o", "--output", metavar="FILE", help="The file to write: of --measure, or of --routing (JSON).")
@click.option("--artifact", "artifacts", multiple=True, metavar="NAME.llmc", help="Of --measure: time its steps too.")
@click.option("--revision", metavar="NAME", help="Of a model hf:org/name: its branch, tag or commit.")
@json_option
def plan(model: str | None, devices: str | None, measure: bool, as_json: bool, **options: Any) -> None:
    """Predict what MODEL does on devices, divided in every way there is, and pick the best that fits.

    MODEL is what `llmc compile` takes, a spec (`llmc spec MODEL -o model.toml`), or an artifact. Nothing runs.
    """
    if measure:
        _measure(model, devices, as_json, options)
        return
    _check(model, devices, options)
    need_compiler("plan")
    from llmc.passes.plan.workload import Workload
    from llmc.plan_options import open_devices, open_planned

    assert model is not None
    assert devices is not None
    found = open_devices(devices)
    planned = open_planned(model, options["quant"], options["kv"], options["revision"])
    names = ("prompt_tokens", "new_tokens", "queries", "micro_batches")
    work = Workload(**{name: options[name] for name in names})
    _plan(planned, found, work, devices, as_json, options)


def _check(model: str | None, devices: str | None, options: dict[str, Any]) -> None:
    if model is None:
        raise click.UsageError("Missing argument 'MODEL'")
    if devices is None:
        raise click.UsageError("Missing option '--devices': a file of devices; --measure writes one for this machine")
    apart = options["first_ms"] is not None or options["token_ms"] is not None
    if apart and (options["first_ms"] is None or options["token_ms"] is None):
        raise click.UsageError("--first-ms and --token-ms go together")
    if apart and not (options["first_ms"] > 0 and options["token_ms"] > 0):
        raise click.UsageError("--first-ms and --token-ms: wanted times above 0")
    chosen = [
        name
        for name, given in (("--first-ms", apart), ("--routing", options["routing"]), ("--ring", options["ring"]))
        if given
    ]
    if len(chosen) > 1:
        raise click.UsageError(f"{' and '.join(chosen)} are different plans; ask for one")
    if options["output"] is not None and not options["routing"]:
        raise click.UsageError("-o is for --measure and --routing")
    if options["artifacts"]:
        raise click.UsageError("--artifact is for --measure")


def _plan(planned: Any, devices: Any, work: Any, file: str, as_json: bool, options: dict[str, Any]) -> None:
    """The kind of plan that was asked for."""
    from llmc import plan_tables as tables

    model = planned.model
    if options["routing"]:
        from llmc.passes.plan.experts import check_routing, costs_of, place_experts, read_routing

        routing = check_routing(read_routing(Path(options["routing"])), model.spec)
        tables.show_experts(place_experts(routing, costs_of(model, devices), devices), options["output"], as_json)
    elif options["ring"]:
        from llmc.passes.plan.ring import plan_ring

        tables.show_ring(planned, plan_ring(model, devices, work), work, as_json)
    elif options["first_ms"] is not None:
        from llmc.passes.plan.disaggregate import Targets, disaggregate

        targets = Targets(options["first_ms"] / 1e3, options["token_ms"] / 1e3)
        tables.show_apart(planned, disaggregate(model, devices, work, targets), work, targets, as_json)
    else:
        from llmc.passes.plan.offload import choose

        chosen = choose(model, devices, work, options["goal"])
        tables.show_plan(planned, chosen, work, file, options, as_json)


def _measure(model: str | None, devices: str | None, as_json: bool, options: dict[str, Any]) -> None:
    """Measure this machine."""
    if model is not None or devices is not None:
        raise click.UsageError("--measure takes no MODEL and no --devices; models are given with --artifact")
    if options["output"] is None:
        raise click.UsageError("--measure wants -o FILE.toml")
    output = Path(options["output"])
    if output.exists():
        raise click.ClickException(f"{output}: is there already; remove it or give another name")
    if not output.resolve().parent.is_dir():
        raise click.ClickException(f"{output}: its folder does not exist")
    from llmc.measure_devices import measure_here
    from llmc.plan_tables import show_measured

    text, facts = measure_here(options["artifacts"])
    output.write_text(text, encoding="utf-8")
    show_measured(str(output), facts, as_json)
