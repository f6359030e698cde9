"""Times of PyTorch on the shape that time_models.py times: the same sizes, bfloat16, its own kernels and CUDA graphs.

    python tests/gpu/time_torch.py PACK [--json FILE] [--compile]

A decoder of F.linear, F.rms_norm and F.scaled_dot_product_attention over a cache of fixed length; decode is one CUDA
graph a batch. With --compile what torch.compile makes of it, which takes a minute. PACK is not read: all parts of
run_all.sh are called alike. Without PyTorch it says so and is content.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shapes
from torch_here import torch_here

PROMPT, CONTEXT, STEPS = 2048, 192, 48
BATCHES = (1, 8, 32)
Row = dict[str, Any]


class Decoder:
    """Llama of these sizes with random weights, on the GPU: q, k and v, gate and up, in one matrix each."""

    def __init__(self, torch: Any, config: dict[str, Any]) -> None:
        self.torch, self.config = torch, config
        width, ffn = config["hidden_size"], config["intermediate_size"]
        self.heads = config["num_attention_heads"]
        made = {"device": "cuda", "dtype": torch.bfloat16}
        self.table = torch.randn(config["vocab_size"], width, **made) * 0.02
        self.head = torch.randn(config["vocab_size"], width, **made) * 0.02
        self.ones = torch.ones(width, **made)
        sizes = ((3 * width, width), (width, width), (2 * ffn, width), (width, ffn))
        self.layers = [[torch.randn(size, **made) * 0.02 for size in sizes] for _ in range(config["num_hidden_layers"])]
        angles = torch.arange(4096, device="cuda")[:, None] * 1e4 ** (-torch.arange(64, device="cuda") / 64)
        self.cos, self.sin = (f(angles).to(torch.bfloat16) for f in (torch.cos, torch.sin))

    def cache(self, batch: int, length: int) -> Any:
        """Keys and values of all layers."""
        shape = (self.config["num_hidden_layers"], 2, batch, self.heads, length, 128)
        return self.torch.zeros(shape, device="cuda", dtype=self.torch.bfloat16)

    def turn(self, x: Any, at: Any) -> Any:
        """Rotary positions; x (batch, heads, tokens, 128)."""
        a, b = x[..., :64], x[..., 64:]
        cos, sin = self.cos[at], self.sin[at]
        return self.torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def step(self, ids: Any, at: Any, cache: Any, mask: Any) -> Any:
        """ids (batch, tokens) at positions -> logits of the last token; with a mask, or causal from the first token."""
        functional = self.torch.nn.functional
        x = functional.embedding(ids, self.table)
        batch, tokens, width = x.shape
        for number, (qkv, out, up, down) in enumerate(self.layers):
            h = functional.rms_norm(x, (width,), self.ones, 1e-5)
            q, k, v = functional.linear(h, qkv).view(batch, tokens, 3, self.heads, 128).permute(2, 0, 3, 1, 4)
            q, k = self.turn(q, at), self.turn(k, at)
            cache[number, 0].index_copy_(2, at, k)
            cache[number, 1].index_copy_(2, at, v)
            seen = (k, v) if mask is None else (cache[number, 0], cache[number, 1])
            found = functional.scaled_dot_product_attention(q, *seen, attn_mask=mask, is_causal=mask is None)
            x = x + functional.linear(found.transpose(1, 2).reshape(batch, tokens, width), out)
            gate, value = functional.linear(functional.rms_norm(x, (width,), self.ones, 1e-5), up).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * value, down)
        return functional.linear(functional.rms_norm(x[:, -1], (width,), self.ones, 1e-5), self.head)


def times_of(torch: Any, decoder: Decoder, step: Callable[..., Any]) -> list[Row]:
    """Rows: a prompt, and decode of each batch; medians."""
    ids = torch.arange(PROMPT, device="cuda")[None]
    cache, positions = decoder.cache(1, PROMPT), torch.arange(PROMPT, device="cuda")
    seconds = _seconds(torch, lambda: step(ids, positions, cache, None), 7)
    rows = [{"case": f"prefill {PROMPT}", "tokens_per_s": PROMPT / seconds,
             "tflops": shapes.prefill_flops(decoder.config, PROMPT) / 1e12 / seconds}]  # fmt: skip
    weights = 2 * sum(each.numel() for layer in decoder.layers for each in layer) + 2 * decoder.head.numel()
    for batch in BATCHES:
        ids = torch.full((batch, 1), 5, device="cuda")
        cache, at = decoder.cache(batch, CONTEXT), torch.tensor([160], device="cuda")
        mask = (torch.arange(CONTEXT, device="cuda") <= 160)[None, None, None]
        replay = _captured(torch, lambda ids=ids, at=at, cache=cache, mask=mask: step(ids, at, cache, mask))
        seconds = _seconds(torch, replay, STEPS)
        nbytes = weights + cache.numel() * 2 * 161 / CONTEXT
        rows.append({"case": f"decode {batch}", "tokens_per_s": batch / seconds, "ms": 1e3 * seconds,
                     "gb_per_s": nbytes / 1e9 / seconds})  # fmt: skip
    return rows


def _captured(torch: Any, work: Callable[[], Any]) -> Callable[[], Any]:
    """A CUDA graph of the work, after it ran on a stream of its own; the greatest logits come to the host."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token = work().argmax(-1)

    def replay() -> None:
        graph.replay()
        token.cpu()

    return replay


def _seconds(torch: Any, work: Callable[[], Any], repeats: int) -> float:
    took = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - begin)
    return statistics.median(took[2:])


def main() -> int:
    """Time it, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    torch = torch_here()
    if torch is None:
        print("no PyTorch that sees the GPU")
        return 0
    with torch.no_grad():
        decoder = Decoder(torch, shapes.SEVEN_BILLION)
        step = torch.compile(decoder.step, dynamic=False) if options.compile else decoder.step
        rows = times_of(torch, decoder, step)
    name = "PyTorch compiled" if options.compile else "PyTorch"
    for row in rows:
        share = f"{row['gb_per_s']:7.0f} GB/s" if "gb_per_s" in row else f"{row['tflops']:7.1f} Tflop/s"
        print(f"{name:16} {row['case']:14} {row['tokens_per_s']:10.1f} tokens/s  {share}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
