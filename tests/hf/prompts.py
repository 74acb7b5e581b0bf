"""Small models, prompts of several lengths, and the expected output of ``generate``."""

import torch
from transformers import AutoModelForCausalLM

import linattn
from linattn.hf import LinattnForCausalLM

MIXERS = ["gla", "gated_deltanet", "mamba2, softmax"]  # all-linear and hybrid
EVERY = [*MIXERS, "softmax", "rwkv7, rwkv_channel", "mlstm, hgrn2", "log_linear", "mamba", "kda, lightning"]


def model(mixer="gla, softmax", **options) -> LinattnForCausalLM:
    config = linattn.LMConfig(**{"vocab_size": 50, "dim": 32, "layers": 2, "mixer": mixer, **options})
    return AutoModelForCausalLM.from_config(config).double().eval()


def greedy(lm, ids, count):
    """Expected output of ``generate``: a whole forward pass for every token."""
    for _ in range(count):
        ids = torch.cat([ids, lm(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids


def ids_of(*shape) -> torch.Tensor:
    return torch.randint(1, 50, shape)


def padded(side: str, lengths=(3, 7, 5)) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Prompts of these lengths in one batch, its mask, and the prompts alone."""
    rows, width = [ids_of(1, n) for n in lengths], max(lengths)
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        at = slice(0, row.shape[1]) if side == "right" else slice(width - row.shape[1], width)
        ids[i, at], mask[i, at] = row[0], 1
    return ids, mask, rows
