"""A conversion in one of several processes: ``torchrun --nproc-per-node 2 -m tests.convert.several FOLDER TEACHER TEXT``."""

import sys

import torch
import transformers

from linattn.distill.conversion import convert

OPTIONS = {"mixer": "gated_deltanet", "keep": 1, "tokens1": 256, "tokens2": 256, "context": 16, "batch_size": 4, "rate2": 1e-3}

if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    out, teacher, text = sys.argv[1:4]
    convert(teacher, text=[text], out=out, resume=True, progress=True, device="cpu", **OPTIONS)
