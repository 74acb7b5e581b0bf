"""Continue a prompt with a trained model, three times: python examples/generate.py runs/example --prompt "class A" (or any other)."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from linattn.generate import stream, stream_text
from linattn.generate.text import printable
from linattn.train import load_run


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the prompt, then write as the tokens come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="what train.py or linattn train wrote")
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8)
    options = parser.parse_args(arguments)

    model, codec = load_run(options.run)
    ids = torch.tensor([codec.encode(options.prompt)])  # [1, T]

    with torch.inference_mode():
        _, state = model(ids, return_state=True)
    print(f"the state after {ids.shape[1]} tokens takes {state.nbytes:,} bytes")

    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        tokens = stream(model, ids[0], max_new_tokens=options.tokens, temperature=options.temperature, generator=generator)
        print(f"--- {seed}\n{options.prompt}", end="")
        for piece in stream_text(tokens, codec.stream()):
            print(printable(piece), end="", flush=True)
        print()


if __name__ == "__main__":
    main()
