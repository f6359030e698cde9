"""`llmc serve`: a model behind OpenAI's HTTP interface."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import click

from llmc.console import json_option, print_json, progress_bars
from llmc.options import copy_weights_option, draft_model_option, drafts_option, for_devices, read_text, threads_option

_NEEDS = ("starlette", "uvicorn", "prometheus_client")


@click.command(
    short_help="Answer over HTTP, as OpenAI's interface does.",
    epilog="""\b
Examples:
  llmc serve smollm2.llmc
  llmc serve smollm2.llmc --host 0.0.0.0 --port 80 --api-key-file keys.txt
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello"}]}'""",
)
@click.argument("artifact", metavar="NAME.llmc")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option("--model-name", metavar="NAME", help="What requests call the model (default: the folder's name).")
@click.option("--api-key-file", metavar="FILE", help="Keys that open it, one a line (also: LLMC_API_KEY, one key).")
@click.option("--max-tokens", type=click.IntRange(1), help="Tokens of an answer at most (default: the context).")
@click.option(
    "--max-waiting", default=512, show_default=True, type=click.IntRange(0), help="Queries that may wait for room."
)
@click.option("--max-body-mb", default=8, show_default=True, type=click.IntRange(1, 1024), help="Of a request.")
@click.option("--allow-origin", "origins", multiple=True, metavar="URL", help="A web page that may call it, or '*'.")
@click.option("--cache-tokens", type=click.IntRange(1), help="Tokens that the KV cache holds, of all queries.")
@click.option("--policy", type=click.Choice(["fcfs", "fair"]), default="fcfs", show_default=True,
              help="Who goes first; fair: 'user' of requests by turns.")  # fmt: skip
@threads_option
@drafts_option
@draft_model_option
@copy_weights_option
@json_option
@for_devices
def serve(
    artifact: str,
    host: str,
    port: int,
    model_name: str | None,
    api_key_file: str | None,
    max_tokens: int | None,
    max_waiting: int,
    max_body_mb: int,
    origins: tuple[str, ...],
    cache_tokens: int | None,
    policy: str,
    threads: int | None,
    drafts: int | None,
    draft_model: str | None,
    copy_weights: bool | None,
    as_json: bool,
) -> None:
    """Serve the model in NAME.llmc until Ctrl-C: /v1/chat/completions, /v1/completions and /v1/models.

    An encoder answers at /v1/embeddings. /health says whether it takes requests, /metrics has counters
    for Prometheus, and / is a page to talk with the model. Requests run together, in one batch.
    docs/server.md says what they may ask for. With --json, standard output says where it is once it
    takes requests.
    """
    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        raise click.ClickException(f"`llmc serve` needs {', '.join(missing)}: pip install 'llmc[serve]'")
    keys = _keys(api_key_file)

    from llmc.runtime.serving.server import address_of, listen

    with listen(host, port) as listening:  # before the model, which takes longer
        import llmc.runtime
        from llmc.runtime.serving.app import App, Limits
        from llmc.runtime.serving.server import serve as run

        with progress_bars() as progress:
            model = llmc.runtime.load(
                artifact,
                threads=threads,
                cache_tokens=cache_tokens,
                policy=policy,
                drafts=drafts,
                draft_model=draft_model,
                copy_weights=copy_weights,
                progress=progress,
            )
        with model:
            limits = Limits(
                max_tokens or model.manifest["context"], keys, max_waiting, max_body_mb << 20, tuple(origins)
            )
            app = App(model, model_name or Path(artifact).resolve().name.removesuffix(".llmc"), limits)
            where = address_of(listening)
            run(app, listening, lambda: _announce(app.name, where, keys, as_json))


def _announce(name: str, where: str, keys: tuple[str, ...], as_json: bool) -> None:
    if as_json:
        print_json({"model": name, "address": where, "keys": bool(keys)})
        return
    to = " to those with a key" if keys else ""
    click.echo(f"serving {name} at {where}/v1{to}, a page to talk with it at {where} (Ctrl-C ends it)", err=True)


def _keys(path: str | None) -> tuple[str, ...]:
    """The keys of a file and of the environment."""
    own = os.environ.get("LLMC_API_KEY")
    found = [own] if own else []
    if path is not None:
        lines = [line.strip() for line in read_text(path).splitlines()]
        found += [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise click.ClickException(f"{path}: it holds no key; a server without keys needs no such file")
    if any(not key.isascii() or not key.isprintable() or " " in key for key in found):
        raise click.ClickException("keys: each is printable ASCII without spaces")
    return tuple(found)
