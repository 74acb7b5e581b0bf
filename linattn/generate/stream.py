"""Decoding: the prompt in one pass, then a step per token with a state of constant size."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from linattn.arguments import described, whole
from linattn.generate.captured import Choice
from linattn.generate.drafter import Source
from linattn.generate.noise import Rule
from linattn.generate.sampling import Sampling, greedy, probabilities, sample
from linattn.generate.speculate import Speculated
from linattn.generate.tokens import Tokens
from linattn.models import Backbone
from linattn.ops.checks import flag, tensor

if TYPE_CHECKING:
    from linattn.models import LanguageModel
    from linattn.state import State


def stream(  # noqa: PLR0913  public
    model: LanguageModel,
    ids: Tensor | Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Collection[int] = (),
    generator: torch.Generator | None = None,
    state: State | None = None,
    lookup: bool = False,
    draft: LanguageModel | None = None,
) -> Tokens:
    """Continue ``ids``, token by token.

    Args:
        model: a :class:`linattn.LanguageModel` or its Hugging Face twin.
        ids: the prompt: [T] or a list of integers, or a batch [B, T]; at least one token.
        max_new_tokens: number of tokens at most.
        temperature, top_k, top_p: see :class:`linattn.generate.Sampling`; temperature 0 is greedy.
        stop: tokens that end a sequence; the stop token itself is returned too.
        generator: for the random numbers, on the model's device; None: torch's default.
        state: the state after the tokens before ``ids``, with a row for each sequence; None: no tokens.
        lookup: draft several tokens at once from the text so far, prompt included, and verify them in one call.
        draft: a small model of the same vocabulary that drafts instead. Up to rounding, drafts change no token, nor, with the same
            ``generator``, sampled ones; if too few are accepted, drafting stops.

    Returns:
        An iterator of integers for one sequence, of tensors [B] for a batch. A row that has ended repeats its stop token,
        and the iterator ends when all have. Its ``state`` can be continued. While tokens are left it has memory of its own, on a GPU a CUDA
        graph too, beside other iterators of the model: drop one that you do not finish.

    Raises:
        ValueError: at the call, for an empty prompt and arguments out of range.
    """
    sampling = Sampling(temperature, top_k, top_p)
    given: object = stop
    if isinstance(given, str) or not isinstance(given, Collection) or not all(isinstance(token, int) for token in given):
        raise TypeError(f"stop must be a list of tokens, integers, but came as {described(stop)}")
    stops = tuple(sorted(frozenset(stop)))
    whole("max_new_tokens", max_new_tokens, 0)
    device: torch.device = language_model("model", model).device
    if generator is not None and (not isinstance(generator, torch.Generator) or generator.device.type != device.type):
        raise TypeError(f"generator must be a torch.Generator on {device}, where the model is, but came as {described(generator)}")
    prompt = as_prompt(ids, device)
    if prompt.ndim not in (1, 2) or prompt.numel() == 0:
        raise ValueError(f"ids must be a prompt [T] or [B, T] of at least one token, but came with shape {list(prompt.shape)}")
    rows = prompt.long().reshape(-1, prompt.shape[-1])
    if state is not None and not hasattr(state, "rows"):
        raise TypeError(f"state must be a linattn.State, but came as {described(state)}")
    if state is not None and state.rows != len(rows):
        raise ValueError(f"state must have a row for each sequence of ids, {len(rows)}, but came with {state.rows}")
    if draft is not None:
        check_draft(draft, model)
    if flag("lookup", lookup) or draft is not None:
        rule = Rule(partial(probabilities, sampling=sampling) if temperature else None, generator)
        return Speculated(model, rows, max_new_tokens, rule, stops, state, Source(draft), single=prompt.ndim == 1, ahead=True)
    choose = partial(sample, sampling=sampling, generator=generator) if temperature else greedy
    return Tokens(model, rows, max_new_tokens, Choice(choose, sampling, generator, stops), state, single=prompt.ndim == 1)


def language_model(name: str, model: Any) -> Any:
    """Return ``model`` if it has the parts that decoding needs; else raise TypeError, or ValueError if its parameters are sharded."""
    head, backbone = getattr(model, "lm_head", None), getattr(model, "model", None)
    if not isinstance(head, nn.Module) or not isinstance(getattr(backbone, "_orig_mod", backbone), Backbone):
        inner = "; give its get_base_model()" if hasattr(model, "get_base_model") else ""
        raise TypeError(f"{name} must be a linattn.LanguageModel or its Hugging Face twin, but came as {described(model)}{inner}")
    if any(hasattr(weight, "device_mesh") for weight in head.parameters()):
        raise ValueError(
            f"{name} must be whole, but its parameters are sharded among processes: save it, and decode with linattn.load(folder)"
        )
    return model


def check_draft(draft: Any, model: Any, name: str = "draft") -> None:
    """Raise TypeError or ValueError unless ``draft`` is a language model with the vocabulary and device of ``model``."""
    ours, theirs = model.lm_head.out_features, language_model(name, draft).lm_head.out_features
    if ours != theirs:
        raise ValueError(f"{name} must have the vocabulary of model, {ours} tokens, but came with {theirs}")
    if model.device != draft.device:
        raise ValueError(f"{name} must be on {model.device}, where model is, but came on {draft.device}")


def as_prompt(ids: Any, device: torch.device) -> Tensor:
    """Return ``ids`` as a tensor of integers; else raise ValueError."""
    try:
        prompt = torch.as_tensor(ids, device=device)
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        raise ValueError(f"ids must be integers [T] or [B, T], but came as {described(ids)}") from None
    if tensor("ids", prompt).dtype not in (torch.uint8, torch.int16, torch.int32, torch.int64) and prompt.numel():
        raise ValueError(f"ids must be integers, but came as {prompt.dtype}")
    return prompt
