"""Steps that begin before anybody knows what the one before gave, on an emulated device: all as if they had waited.

Work on the device's stream is done when somebody waits for it, so what is read or written too early is wrong here.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "gpu")]
import emulated
from test_cuda_steps import artifact, device, steps

pytestmark = pytest.mark.skipif(not emulated.available(), reason="no g++ here, or not an x86-64 processor")
__all__ = ["artifact", "device"]  # fixtures

# `follows`: steps that followed; with `alone`, none does.
COUNTED = """
    import json
    from contextlib import contextmanager
    from llmc.runtime.decoding.options import Options
    from llmc.runtime.runner import Feed
    kind, follows = type(model.runner.step_function), []
    real = kind.follow

    def counted(self, *arrays):
        found = real(self, *arrays)
        follows.append(found is not None)
        return found

    kind.follow = counted

    @contextmanager
    def alone():
        kind.follow = lambda *_: None
        yield
        kind.follow = counted

    def check():
        model.engine.forget_prefixes()
        model.runner.pool.check([])
"""

SCHEDULES = f"""
    sys.path.insert(0, {str(Path(__file__).parents[1] / "runtime")!r})
    import schedules
"""


def test_answers_are_those_of_steps_that_wait(device: dict[str, str], artifact: Path) -> None:
    """Of different lengths, ended by texts and tokens, forked, beside those that are not plain, cancelled, drafted."""
    found = steps(device, artifact, COUNTED + SCHEDULES + """
    prompts = [list(range(5, 5 + count)) for count in (9, 30, 17, 1)]
    first = model.generate(prompts[0], max_tokens=24, ignore_eos=True)
    piece = first.text[len(first.text) // 2 :][:2]
    wishes = [
        dict(max_tokens=24, ignore_eos=True), dict(max_tokens=2, ignore_eos=True), dict(max_tokens=24, stop=piece),
        dict(max_tokens=13, n=2, temperature=0.5, seed=1), dict(max_tokens=20, ignore_eos=True, logprobs=3),
        dict(max_tokens=9, ignore_eos=True, repetition_penalty=1.3), dict(max_tokens=9, temperature=0.8, seed=3),
        dict(max_tokens=9, beams=2),
    ]

    def told(answer):
        rows = [(c.token, round(c.logprob, 4), c.top and [t for t, _ in c.top]) for c in answer.logprobs or ()]
        return [answer.ids, answer.text, answer.finish_reason, rows, [told(other) for other in answer.others]]

    def all_of():
        got = [told(model.generate(prompt, **wish)) for wish in wishes for prompt in prompts[:2]]
        together = [model.engine.add_query(p, Options(**w)) for w in (wishes[0], *wishes) for p in prompts[1:]]
        ends = {}
        for number in range(400):
            if number == 7:
                model.engine.cancel(together[0])
                together.append(model.engine.add_query(prompts[1], Options(max_tokens=12, ignore_eos=True)))
            for result in model.engine.infer():
                if result.done is not None:
                    ends[result.id] = told(result.done)
        check()
        return got + [ends.get(query) for query in together[1:]]

    with alone():
        wanted = all_of()
    mine = all_of()

    from llmc.runtime.decoding.lookup import Lookup
    from llmc.runtime.engine.learned import Odds
    texts = [prompt + model.generate(prompt, max_tokens=24, ignore_eos=True).ids for prompt in prompts]

    Lookup.guess, Odds.of = schedules.guess_from(texts), lambda *_: 0.9
    model.engine._drafter.most, followed = 5, len(follows)
    drafted = all_of()
    stats = model.engine.stats
    print(json.dumps({"same": mine == wanted, "count": len(mine), "follows": sum(follows), "none": None in wanted,
                      "drafted": drafted == wanted, "right": [stats.accepted, stats.drafted],
                      "followed": len(follows) - followed}))
""")  # fmt: skip
    assert found["same"]
    assert not found["none"]
    assert found["follows"] > 50
    assert found["drafted"]  # tokens that were guessed: who drafts does not follow
    assert found["followed"] == 0
    assert found["right"][1] > found["right"][0] > 20


@pytest.mark.thorough
def test_a_cache_that_is_too_small_for_all(device: dict[str, str], artifact: Path) -> None:
    """Queries give way and come back, by reading again and by copies."""
    found = steps(device, artifact, COUNTED + """
    import llmc.runtime
    prompts = [list(range(5 + count, 5 + 2 * count)) for count in (40, 33, 50, 21, 45, 12)]

    def answers(preemption):
        with llmc.runtime.load(sys.argv[1], cache_tokens=256, preemption=preemption) as small:
            queries = [small.engine.add_query(p, Options(max_tokens=40, ignore_eos=True)) for p in prompts]
            ends = {}
            while small.engine.query_count:
                ends |= {r.id: r.done.ids for r in small.engine.infer() if r.done is not None}
            return [ends[query] for query in queries], small.engine.stats.preempted

    with alone():
        wanted, before = answers("recompute")
    again = [answers(preemption) for preemption in ("recompute", "swap")]
    print(json.dumps({"same": all(mine == wanted for mine, _ in again), "gave way": [before, *(n for _, n in again)],
                      "follows": sum(follows)}))
""")  # fmt: skip
    assert found["same"]
    assert min(found["gave way"]) > 0
    assert found["follows"] > 10


def test_what_a_runner_follows(device: dict[str, str], artifact: Path) -> None:
    """The greatest tokens go on; logits of a step that was followed are gone, and said to be; others stay."""
    found = steps(device, artifact, COUNTED + """
    from llmc.runtime.cuda.device import the_device
    runner, prompts = model.runner, [list(range(5, 20)), list(range(40, 47))]

    def greedy(count, ahead):
        sequences, told = [runner.new_sequence() for _ in prompts], []
        tokens = runner.prefill(list(zip(sequences, prompts))).argmax
        begun = runner.begin([Feed(each, [int(token)]) for each, token in zip(sequences, tokens)])
        for _ in range(count):
            after = runner.follow(begun) if ahead else None
            output = begun.wait()
            told.append([output.argmax.tolist(), [round(float(n), 4) for n in output.normalizers]])
            tokens = output.argmax
            del output, begun  # who holds a step's logits has them read before the next one is launched
            begun = after or runner.begin([Feed(each, [int(token)]) for each, token in zip(sequences, tokens)])
        lengths = [each.length for each in sequences]
        for each in sequences:
            runner.release(each)
        return told, lengths

    def counted_bytes(ahead):
        before = count(b"bytes to host")
        return greedy(40, ahead), count(b"bytes to host") - before

    greedy(40, False)
    (wanted, waiting), (mine, following) = counted_bytes(False), counted_bytes(True)
    two = [runner.new_sequence() for _ in prompts]
    tokens = runner.prefill(list(zip(two, prompts))).argmax

    def begin(tokens):
        return runner.begin([Feed(each, [int(token)]) for each, token in zip(two, tokens)])

    plain = begin(tokens).wait()
    begun = begin(plain.argmax)
    behind = runner.follow(begun)
    assert behind is not None
    gone, output = begun.wait(), behind.wait()
    try:
        gone.logits
        said = ""
    except LlmcError as error:
        said = str(error)
    logits = output.logits  # of the last step, which nothing has followed
    best = logits.argmax(1).tolist() == output.argmax.tolist()
    late = [runner.follow(begun) is None]  # another one was begun behind it
    whole = runner.begin([Feed(two[0], [5, 6])])
    late.append(runner.follow(whole) is None)
    whole.wait()
    begun = begin(output.argmax)
    model.generate(prompts[0], max_tokens=2, ignore_eos=True)  # others use the device
    late.append(runner.follow(begun) is None)
    begun.wait()
    for each in two:
        runner.release(each)
    check()
    print(json.dumps({"same": mine == wanted, "follows": sum(follows), "said": said, "best": best, "late": late,
                      "bytes": [waiting, following]}))
""")  # fmt: skip
    assert found["same"]
    assert found["follows"] > 30
    assert "followed" in found["said"]
    assert found["best"]
    assert found["late"] == [True, True, True]
    assert found["bytes"][0] <= found["bytes"][1]  # logits that nobody has asked for stay where they are
