"""Score a trained model with lm-eval, offline: python examples/evaluate.py runs/example --tasks ruler_fwe --length 1024 --limit 20

Needs ``pip install "lm_eval[hf,ruler]==0.4.13"``. The model goes through lm-eval's own ``hf`` class, so that every task of lm-eval can
be named; those of RULER are made up on the spot and need no network (``ruler_qa_*`` and NIAH in essays do).
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import linattn.hf  # noqa: F401  (so that the Auto classes know the model)
from linattn.hf.tokenizer import tokenizer_of
from linattn.train import checkpoint, load_run


def main(arguments: Sequence[str] | None = None) -> None:
    """Print lm-eval's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="what train.py or linattn train wrote")
    parser.add_argument("--tasks", default="ruler_fwe", help="names of lm-eval's tasks, with commas")
    parser.add_argument("--length", type=int, default=1024, help="tokens of RULER's texts")
    parser.add_argument("--limit", type=int, help="texts of each task (default: all)")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--end", help="the token that ends a text, where a tokenizer.json was trained with")
    options = parser.parse_args(arguments)

    from lm_eval import simple_evaluate
    from lm_eval.utils import make_table

    _, codec = load_run(options.run)
    model = {"pretrained": str(checkpoint.newest(options.run) or options.run), "device": options.device}
    with tempfile.TemporaryDirectory() as tokenizer:
        tokenizer_of(codec, end=options.end).save_pretrained(tokenizer)
        results = simple_evaluate(
            "hf",
            model_args=model | {"tokenizer": tokenizer, "max_length": options.length + 256},  # and what is generated
            tasks=options.tasks.split(","),
            limit=options.limit,
            batch_size=options.batch,
            metadata={"tokenizer": tokenizer, "max_seq_lengths": [options.length]},
        )
    print(make_table(results))


if __name__ == "__main__":
    main()
