"""Train a small hybrid on real text: python examples/train.py --mixer "gla*3, softmax" --steps 200 --out runs/example"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from linattn.train import TrainOptions, train


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, then print how the validation loss went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixer", default="gla*3, softmax", help="a pattern of mixers, repeated until the layers are filled")
    parser.add_argument("--text", nargs="*", type=Path, help="files to learn from (default: the source of Python's standard library)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("runs/example"))
    options = vars(parser.parse_args(arguments))

    result = train(TrainOptions(**options))

    print(f"{result.parameters:,} parameters, {result.tokens_per_second:,.0f} tokens/s")
    for row in result.history:
        print(f"step {row['step']:>6}  {row['validation_bits_per_byte']:.3f} bits per byte")
    print(f"next: python examples/generate.py {result.run}")


if __name__ == "__main__":
    main()
