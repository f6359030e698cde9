"""Compile a model, then talk to what came out.

python examples/01_compile_and_chat.py MODEL [OUTPUT.llmc]

MODEL is a GGUF file or a Hugging Face folder; examples/fetch_smollm2.py prints the path of one.
"""

from __future__ import annotations

import sys

import llmc


def main(source: str, output: str) -> None:
    """Compile `source` to `output`, ask two questions and print the answers and the speed."""
    result = llmc.compile(source, output)
    print(f"{result.path}: {result.bits_per_weight:.2f} bits per weight, {result.seconds:.1f} s")

    with llmc.load(output) as model:
        messages = [{"role": "user", "content": "Give me three tips for staying healthy."}]
        answer = model.chat(messages, max_tokens=40)
        print(answer.text)

        # A conversation is the list of what was said so far.
        messages += [
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": "How high is it?"},
        ]
        for piece in model.chat_stream(messages, max_tokens=40):
            print(piece, end="", flush=True)
        print()
        timings = answer.timings
        print(f"{timings['decode_tokens'] / timings['decode_s']:.0f} tokens per second")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else "model.llmc")
