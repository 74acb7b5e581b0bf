"""Losses of the stages: output errors of mixers, KL of next-token distributions, cross-entropy.

Logits [B, T, vocab] are never materialised: the head, the loss and its gradient are computed in pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from linattn.distill.student import replaced
from linattn.distill.teacher import TeacherPass
from linattn.mixers.parts import to_float32

Pointwise = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

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
    return _summed(student, divergence, hidden, cast(Any, teacher).lm_head, target)


def divergence(scores: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Sum KL(softmax(wanted) || softmax(scores)) of logits [N, V]; its gradient for ``scores``, softmax(scores) - softmax(wanted)."""
    dtype = torch.promote_types(scores.dtype, torch.float32)
    log_q, log_p = (t.log_softmax(-1, dtype=dtype) for t in (scores, wanted))
    p = log_p.exp()
    return log_p.sub_(log_q).mul_(p).sum(), log_q.exp_().sub_(p).to(scores.dtype)


def cross_entropy(student: nn.Module, hidden: Tensor, ids: Tensor) -> Tensor:
    """Sum the cross-entropy of ``ids`` [B, T] over all tokens but the first of each row, in nats."""
    return _summed(student, surprise, hidden[:, :-1], nn.Identity(), ids[:, 1:])


def surprise(scores: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the cross-entropy of the tokens ``wanted`` [N] under logits [N, V]; its gradient for ``scores``."""
    log_q = scores.log_softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    places = wanted[:, None]
    value = -log_q.gather(1, places).sum()
    slope = log_q.exp_()
    return value, slope.scatter_add_(1, places, -torch.ones_like(slope[:, :1])).to(scores.dtype)


def agreement(student: nn.Module, teacher: nn.Module, hidden: Tensor, target: Tensor) -> Tensor:
    """Count the tokens for which both models predict the same most likely next token."""

    def piece(h: Tensor, t: Tensor) -> Tensor:
        return (cast(Any, student).lm_head(h).argmax(-1) == cast(Any, teacher).lm_head(t).argmax(-1)).sum()

    return _in_pieces(piece, _vocab(student), hidden, target)


def _vocab(model: nn.Module) -> int:
    return cast(int, cast(Any, model).lm_head.out_features)


def _rows(like: Tensor, vocab: int) -> int:
    """Tokens whose logits are in memory at a time."""
    return max(1, (PIECE if like.device.type == "cpu" else PIECE_GPU) // vocab)


def _in_pieces(function: Callable[..., Tensor], vocab: int, *tensors: Tensor) -> Tensor:
    """Sum ``function`` over pieces of the tokens of ``tensors`` [B, T, ...], without gradients."""
    pieces = zip(*(t.flatten(0, 1).split(_rows(tensors[0], vocab)) for t in tensors), strict=True)
    with torch.no_grad():
        return torch.stack([function(*piece) for piece in pieces]).sum()


def _summed(student: nn.Module, pointwise: Pointwise, hidden: Tensor, other: nn.Module, target: Tensor) -> Tensor:
    head = cast(Any, student).lm_head
    how = (pointwise, head, other, _rows(hidden, _vocab(student)), torch.is_grad_enabled())
    return cast(Tensor, _Sum.apply(how, target.flatten(0, 1), hidden.flatten(0, 1), *head.parameters()))


class _Sum(torch.autograd.Function):
    """Sum of ``pointwise(head(hidden), other(target))`` over tokens; gradients are computed with the values, piece by piece.

    ``pointwise`` returns the sum for logits [N, V] and its gradient for them.
    """

    @staticmethod
    def forward(ctx: Any, how: tuple[Any, ...], target: Tensor, *given: Tensor) -> Tensor:
        pointwise, head, other, rows, learns = how
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[2:]) if needed and learns]
        hidden = given[0].detach().requires_grad_(bool(wanted))
        total, gradients = [], {i: torch.zeros_like(given[i]) for i in wanted}
        for start in range(0, len(hidden), rows):
            piece = slice(start, start + rows)
            with torch.set_grad_enabled(bool(wanted)):
                x = hidden[piece]
                logits = head(x)
            with torch.no_grad():
                value, slope = pointwise(logits, other(target[piece]))
            total.append(value)
            if wanted:
                parts = torch.autograd.grad(logits, [given[i] if i else x for i in wanted], slope)
                for i, part in zip(wanted, parts, strict=True):
                    (gradients[i] if i else gradients[i][piece]).add_(part)
            del logits, slope
        ctx.wanted = wanted
        ctx.save_for_backward(*gradients.values())
        return torch.stack(total).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found = dict(zip(ctx.wanted, ctx.saved_tensors, strict=True))
        return None, None, *((gradient * found[i]).to(found[i].dtype) if i in found else None for i in range(len(ctx.needs_input_grad) - 2))
