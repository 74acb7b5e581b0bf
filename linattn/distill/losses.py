"""Losses of the stages: output errors of mixers, KL of next-token distributions, cross-entropy.

Logits [B, T, vocab] never exist as a whole: the head and the loss are computed in pieces, and recomputed for the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from linattn.distill.student import replaced
from linattn.distill.teacher import TeacherPass
from linattn.mixers.parts import to_float32

PIECE, PIECE_GPU = 1 << 24, 1 << 27  # logits in memory at a time


def output_errors(student: nn.Module, seen: TeacherPass) -> Tensor:
    """Compute the normalised squared error [layers] of every replaced mixer's output on the teacher's inputs.

    The sum of squared differences divided by the sum of squares of the teacher's output: 1 is the error of an output of zeros.
    """
    names = cast(Any, student).config.mixer_names
    shared: dict[str, Tensor | None] = {}
    errors = []
    for i in replaced(student):
        mixer = cast(Any, student).model.layers[i].mixer
        if mixer.shares:
            y, _, shared[names[i]] = mixer(seen.inputs[i], shared=shared.get(names[i]), return_shared=True)
        else:
            y = mixer(seen.inputs[i])
        target = to_float32(seen.outputs[i])
        errors.append((to_float32(y) - target).square().sum() / target.square().sum())
    return torch.stack(errors)


def distances(student: nn.Module, teacher: nn.Module, hidden: Tensor, target: Tensor) -> Tensor:
    """Sum KL(teacher || student) of the next-token distributions over all tokens, in nats.

    Args:
        student, teacher: models with a head.
        hidden, target: hidden states [B, T, D] of both.
    """

    def piece(h: Tensor, t: Tensor) -> Tensor:
        with torch.no_grad():
            log_p = _log_softmax(teacher, t)
        return F.kl_div(_log_softmax(student, h), log_p, reduction="sum", log_target=True)

    return _in_pieces(piece, _vocab(student), hidden, target)


def cross_entropy(student: nn.Module, hidden: Tensor, ids: Tensor) -> Tensor:
    """Sum the cross-entropy of ``ids`` [B, T] over all tokens but the first of each row, in nats."""

    def piece(h: Tensor, wanted: Tensor) -> Tensor:
        return F.nll_loss(_log_softmax(student, h), wanted, reduction="sum")

    return _in_pieces(piece, _vocab(student), hidden[:, :-1], ids[:, 1:])


def agreement(student: nn.Module, teacher: nn.Module, hidden: Tensor, target: Tensor) -> Tensor:
    """Count the tokens for which both models predict the same most likely next token."""

    def piece(h: Tensor, t: Tensor) -> Tensor:
        return (cast(Any, student).lm_head(h).argmax(-1) == cast(Any, teacher).lm_head(t).argmax(-1)).sum()

    return _in_pieces(piece, _vocab(student), hidden, target)


def _log_softmax(model: nn.Module, hidden: Tensor) -> Tensor:
    return to_float32(cast(Any, model).lm_head(hidden)).log_softmax(-1)


def _vocab(model: nn.Module) -> int:
    return cast(int, cast(Any, model).lm_head.out_features)


def _in_pieces(function: Callable[..., Tensor], vocab: int, *tensors: Tensor) -> Tensor:
    """Sum ``function`` over pieces of the tokens of ``tensors`` [B, T, ...]."""
    rows = max(1, (PIECE if tensors[0].device.type == "cpu" else PIECE_GPU) // vocab)
    pieces = zip(*(t.flatten(0, 1).split(rows) for t in tensors), strict=True)
    if not torch.is_grad_enabled():
        return torch.stack([function(*piece) for piece in pieces]).sum()
    return torch.stack([checkpoint(function, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]).sum()
