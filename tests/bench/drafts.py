"""What drafts save: answers of several kinds with guesses and without, beside others that look prompts up.

    python tests/bench/drafts.py [--threads 1] [--rounds 3] [--new-tokens 160] [--kinds code,chat] [--peers FOLDER]
        [--draft-model SMALL.llmc]

SmolLM2 with q4 weights, or an --artifact with a chat template. Kinds: "quote", a page of a novel to be written once
more; "edit", the same with a name changed; "ask", a question about a page; "code"; "chat"; "form", JSON of a schema;
"again", the same behind another answer of that form; "sampled", at temperature 1, where little can be guessed. Every
prompt is answered with and without drafts by turns, in one process; it is an error if the tokens differ. FOLDER is that
of compare.py: llama.cpp with its Q4_0 file and OpenVINO with int4 weights look prompts up with and without it, for
greedy kinds. A draft model guesses too, by turns with the rest. Rates are tokens a second from an answer's first token
to its last.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

from drafts_case import Rates
from engine_case import Row, arguments, show, with_artifact
from texts import EVALUATION, austen

KINDS = ("quote", "edit", "ask", "code", "chat", "form", "again", "sampled")
WAYS = {"none": 0, "3": 3, "7": 7}  # tokens that are drafted at most; in another, by a draft model too
MODEL = "model"
PAGES, PAGE_CHARS = 4, 1400
CODE = (
    "Write a Python class Stack with push, pop, peek, is_empty and size, each with a docstring, then a class Queue "
    "with the same methods.",
    "Write a Python function for each of the four seasons that prints its months, and a test for each function.",
    "Write HTML for a table of the planets with columns name, mass and distance from the sun.",
    "Write SQL that creates tables for customers, orders and products, and inserts three rows into each.",
)
CHAT = (
    "Give me three tips for staying healthy.",
    "Explain to a child why the sky is blue.",
    "What should I see in Rome in two days?",
    "Tell me a story about a fox and a crow who meet in winter.",
)
FORMED = ("List cities of Europe.", "List cities of Asia.", "List towns by the sea.")
FORM = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "population": {"type": "integer", "maximum": 99_999_999},
            "country_of_origin": {"type": "string", "maxLength": 30},
        },
        "required": ["name", "population", "country_of_origin"],
        "additionalProperties": False,
    },
    "minItems": 5,
    "maxItems": 8,
}
# llama.cpp's and OpenVINO's ways are asked for by these.
PEERS = {"llamacpp": "smollm2/llamacpp-Q4_0.gguf", "openvino": "smollm2/openvino-int4"}


def kinds(model: Any) -> dict[str, tuple[list[list[int]], dict[str, Any]]]:
    """Name -> prompts, and the options of their answers."""
    text = austen(EVALUATION)[40_000:]
    pages = [text[at : at + PAGE_CHARS] for at in range(0, 25_000 * PAGES, 25_000)]

    def asked(questions: Any) -> list[list[int]]:
        return [model.chat_prompt([{"role": "user", "content": question}]) for question in questions]

    return {
        "quote": (asked(f"Repeat this text word for word.\n\n{page}" for page in pages), {}),
        "edit": (asked(f"Write this text again, with Susan in place of Anne.\n\n{page}" for page in pages), {}),
        "ask": (asked(f"{page}\n\nWho is in this text, and what do they do?" for page in pages), {}),
        "code": (asked(CODE), {}),
        "chat": (asked(CHAT), {}),
        "form": (asked(FORMED), {"json_schema": FORM}),
        "again": (asked(FORMED), {"json_schema": FORM}),
        "sampled": (asked(CHAT), {"temperature": 1.0, "seed": 7}),
    }


def measure(
    artifact: Path, threads: int, rounds: int, new_tokens: int, only: list[str], peers: Path | None,
    draft_model: Path | None,
) -> list[Row]:  # fmt: skip
    """A row for each kind."""
    import llmc

    with llmc.load(artifact, threads=threads, drafts=max(WAYS.values()), draft_model=draft_model) as model:
        every = {name: case for name, case in kinds(model).items() if name in only}
        found = {name: _ours(model, name, *case, rounds, new_tokens) for name, case in every.items()}
    greedy = {name: prompts for name, (prompts, options) in every.items() if not options}
    others = (
        {} if peers is None else {name: _theirs(peers, name, greedy, threads, rounds, new_tokens) for name in PEERS}
    )
    rows = []
    for name, (rates, told) in found.items():
        most = list(rates)[-1]
        row: Row = {"kind": name, **{f"drafts {way}": rate for way, rate in rates.items()}}
        row |= {"times": rates[most] / rates["none"], **told}
        for peer, its in others.items():
            plain, looked_up = its.get(name, ("", ""))
            row |= {peer: plain, f"{peer}, looked up": looked_up}
        rows.append(row)
    return rows


def _ours(
    model: Any, name: str, prompts: list[list[int]], options: dict[str, Any], rounds: int, new_tokens: int
) -> tuple[dict[str, float], Row]:  # fmt: skip
    """Rates by way; of the last one, tokens of a step and the share of guesses that were right."""
    from llmc.runtime import Options

    engine, wishes = model.engine, Options(max_tokens=new_tokens, **options)
    asking = engine._drafter.asking
    ways = WAYS if asking is None else WAYS | {MODEL: max(WAYS.values())}
    last = list(ways)[-1]
    rates, texts = Rates(), defaultdict[int, set[str]](set)
    steps = tokens = drafted = accepted = 0
    for turn in range(rounds):
        for place, prompt in enumerate(prompts):
            for way in ways if turn % 2 else reversed(ways):
                engine._drafter.most = ways[way]
                engine._drafter.asking = asking if way == MODEL else None
                engine.forget_prefixes()
                if name == "again":
                    model.generate(prompts[place - 1], max_tokens=new_tokens, **options)
                before = engine.stats
                with rates.answer(way) as said:
                    for result in engine.follow([model.add(prompt, wishes)]):
                        said(int(result.token is not None))
                        if result.done is not None:
                            texts[place].add(json.dumps(result.done.ids))
                if way == last:
                    after = engine.stats
                    steps, tokens = steps + after.steps - before.steps, tokens + after.tokens - before.tokens
                    drafted += after.drafted - before.drafted
                    accepted += after.accepted - before.accepted
    engine._drafter.asking = asking
    if any(len(each) != 1 for each in texts.values()):
        raise SystemExit("drafts changed what was said")
    told = {"tokens a step": tokens / steps, "right %": 100 * accepted / max(1, drafted)}
    return {way: rates.median(way) for way in ways}, told


def _theirs(
    peers: Path, name: str, greedy: dict[str, list[list[int]]], threads: int, rounds: int, new_tokens: int
) -> dict[str, tuple[float, float]]:  # fmt: skip
    """Rates of each kind, without looking the prompt up and with it."""
    request = {"open": name, "model": str(peers / "models" / PEERS[name]), "threads": threads, "kinds": greedy,
               "rounds": rounds, "new": new_tokens}  # fmt: skip
    command = [str(peers / name / "bin" / "python"), str(HERE / "drafts_case.py")]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    answer: dict[str, tuple[float, float]] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    """Measure, and print."""
    options = _arguments()
    rows = with_artifact(
        options.artifact,
        lambda path: measure(
            path, options.threads, options.rounds, options.new_tokens, options.kinds, options.peers, options.draft_model
        ),
    )
    show(f"tokens a second, {options.threads} threads", rows, options.json)
    print(f"the last of these over none, geometric mean: {statistics.geometric_mean(r['times'] for r in rows):.2f}")


def _arguments() -> Any:
    parser = arguments(__doc__, threads=1, rounds=3, new_tokens=160)
    parser.add_argument(
        "--kinds", type=lambda text: text.split(","), default=list(KINDS), help="some of them: code,chat"
    )
    parser.add_argument("--peers", type=Path, help="a folder of interpreters and models, as compare.py has it")
    parser.add_argument("--draft-model", type=Path, help="a smaller artifact with the same tokenizer")
    options = parser.parse_args()
    if unknown := set(options.kinds) - set(KINDS):
        parser.error(f"--kinds: {', '.join(sorted(unknown))}: wanted some of {', '.join(KINDS)}")
    return options


if __name__ == "__main__":
    main()
