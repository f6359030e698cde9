"""Build a small model's graph, run one pass over it, and see what changed.

python examples/02_look_into_the_compiler.py
"""

from llmc.compiler.spec import example
from llmc.frontends.graph.build import build
from llmc.passes.pipeline import stages


def calls(module: object) -> dict[str, int]:
    """How often each llmc op stands in the printed step."""
    counts: dict[str, int] = {}
    for word in module.script().split('"'):  # type: ignore[attr-defined]
        if word.startswith("llmc."):
            counts[word] = counts.get(word, 0) + 1
    return counts


def main() -> None:
    """Print the ops of the step before and after every stage of the pipeline."""
    module = build(example())
    before = calls(module)
    print("the graph as the frontend wrote it:", before)
    for stage in stages(lambda weight: "q4"):
        module = stage.apply(module)
        after = calls(module)
        gone = {op: n - after.get(op, 0) for op, n in before.items() if n > after.get(op, 0)}
        new = {op: n - before.get(op, 0) for op, n in after.items() if n > before.get(op, 0)}
        print(f"\n{stage.name} ({stage.reason})\n  gone: {gone}\n  new:  {new}")
        before = after


if __name__ == "__main__":
    main()
