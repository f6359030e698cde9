"""What the planner says of placements, as JSON for `python tests/bench/devices.py --predicted`.

    llmc plan --measure -o here.toml --artifact smollm2.llmc
    python tests/bench/planned.py smollm2.llmc here.toml --placements "0,0;1,0&1" > planned.json

Tokens per second of each placement: "speed" of one query, "one_a_stage" of one query for each stage, in a step of its
own, "throughput" of --queries. The model is what `llmc plan` takes; --wait: stages wait for one another.
"""

from __future__ import annotations

import argparse
import json

from llmc.passes.plan.predict import Placed
from llmc.passes.plan.workload import Workload
from llmc.plan_options import open_devices, open_planned


def main() -> None:
    """Predict each placement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("devices")
    parser.add_argument("--quant", default="auto")
    parser.add_argument("--kv", default="auto")
    parser.add_argument("--placements", default="0,0;1,0&1", help="device strings, commas between them")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--queries", type=int, default=8)
    parser.add_argument("--wait", action="store_true", help="stages wait for one another")
    options = parser.parse_args()
    model, devices = open_planned(options.model, options.quant, options.kv).model, open_devices(options.devices)
    micro = 1 if options.wait else None
    found = {}
    for text in options.placements.split(","):
        placement = devices.placement(text)
        placed, stages = Placed(model, devices, placement), len(placement.stages)
        sizes = options.prompt_tokens, options.new_tokens
        whole = placed.predict(Workload(*sizes, options.queries, micro_batches=micro))
        one = placed.predict(Workload(*sizes, stages, micro_batches=stages))
        rates = {"speed": 1 / whole.token_s, "one_a_stage": one.tokens_per_s, "throughput": whole.tokens_per_s}
        found[text] = rates
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
