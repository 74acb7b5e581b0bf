"""Quantisation with calibration, block by block: one block's inputs and second moments are in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from linattn.models.quantised import Format
from linattn.ops.checks import check_tokens
from linattn.quantization.rounding import compensated, rounded

ROWS = 4  # rows of tokens per forward pass
Progress = Callable[[str], None]
Put = Callable[[nn.Module, str, Format, Callable[..., Any]], None]


def checked(model: Any, tokens: Tensor) -> Tensor:
    """Check ``tokens`` [N, T] and move them to the device of ``model``; raises ValueError."""
    if tokens.is_meta or (not tokens.is_nested and (tokens.ndim != 2 or tokens.numel() == 0)):
        raise ValueError(f"calibrate must be tokens [N, T] with values, but came with shape {list(tokens.shape)} on {tokens.device}")
    check_tokens("calibrate", tokens, model.model.embedding.num_embeddings)
    return tokens.to(next(model.parameters()).device)


@torch.no_grad()
def quantise(model: Any, chosen: dict[str, Format], tokens: Tensor, put: Put, progress: Progress) -> None:
    """Quantise the layers ``chosen`` of ``model`` in place, each block with the outputs of the quantised blocks before it as inputs.

    Args:
        model: a language model, in evaluation mode.
        chosen: formats by name.
        tokens: [N, T].
        put: function that quantises one layer of a model, by a function of weight and format.
        progress: called with the name of each quantised layer.
    """
    backbone = model.model
    if (name := "model.embedding") in chosen:
        put(model, name, chosen[name], rounded)
        progress(name)
    batches = [backbone.entered(backbone.embedding(ids)) for ids in tokens.split(ROWS)]
    shared: list[dict[str, Tensor | None]] = [{} for _ in batches]
    for i, (layer, mixer) in enumerate(zip(backbone.layers, model.config.mixer_names, strict=True)):
        run = partial(_through, layer, mixer)
        names = [name for name in chosen if name.startswith(f"model.layers.{i}.")]
        _fit(model, names, chosen, [partial(run, x, dict(told)) for x, told in zip(batches, shared, strict=True)], put, progress)
        for k, x in enumerate(batches):
            batches[k] = run(x, shared[k])
    batches = [backbone.joined(x) for x in batches]
    if "lm_head" in chosen:
        _fit(model, ["lm_head"], chosen, [partial(model.lm_head, x) for x in batches], put, progress)


def _through(layer: Any, mixer: str, x: Tensor, shared: dict[str, Tensor | None]) -> Tensor:
    """Output of one block; ``shared`` receives the tensor passed on to the next block with the same mixer."""
    y: Tensor
    y, _, shared[mixer] = layer(x, None, shared.get(mixer), return_state=False, mask=None, cu_seqlens=None)
    return y


def _fit(
    model: nn.Module, names: list[str], chosen: dict[str, Format], runs: list[Callable[[], Any]], put: Put, progress: Progress
) -> None:
    """Quantise layers by the second moments of their inputs in ``runs``; layers without input are rounded to nearest."""
    with _moments({name: model.get_submodule(name) for name in names}) as moments:
        for run in runs:
            run()
    for name in names:
        h = moments.pop(name, None)
        put(model, name, chosen[name], rounded if h is None else partial(_with, h))
        progress(name)


def _with(moments: Tensor, weight: Tensor, form: Format) -> Any:
    return compensated(weight, form, moments)


@contextmanager
def _moments(layers: dict[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Record the second moments [K, K] of the inputs of ``layers`` within the context; layers with the same input share them."""
    found: dict[str, Tensor] = {}

    def watch(name: str, _: nn.Module, given: tuple[Tensor, ...]) -> None:
        x = given[0].detach().flatten(0, -2).float()
        moments = x.T @ x
        found[name] = found[name].add_(moments) if name in found else moments

    handles = [layer.register_forward_pre_hook(partial(watch, name)) for name, layer in layers.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
