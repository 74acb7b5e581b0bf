"""Identity of a state's model: its configuration, its dtype and its weights, so that only this model continues it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

_KNOWN: WeakKeyDictionary[nn.Module, tuple[Any, str]] = WeakKeyDictionary()


def identity(model: nn.Module) -> dict[str, Any]:
    """Identity of a :class:`linattn.LanguageModel` or its Hugging Face twin: ``config``, ``dtype`` and ``weights`` (a sha256).

    Both have equal identities. Weights are hashed again after a write to one of them; detecting it reads them all.

    Raises:
        TypeError: for any other object.
    """
    from linattn.models.config import LMConfig

    config: Any = getattr(model, "config", None)
    if not isinstance(config, LMConfig):
        raise TypeError(f"model must be a linattn.LanguageModel or its Hugging Face twin, but came as {type(model).__name__}")
    given = {f.name: getattr(config, f.name) for f in fields(LMConfig)}
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return {"config": json.loads(json.dumps(given)), "dtype": dtype, "weights": _weights(model)}


def difference(theirs: Any, ours: Mapping[str, Any]) -> str | None:
    """Difference between a file's model and the given one, worded to follow the file's name; None if they are the same."""
    if not isinstance(theirs, dict) or not isinstance(theirs.get("config"), dict):
        return "does not name its model"
    config, own = theirs["config"], ours["config"]
    for name in sorted(config.keys() | own.keys()):
        if config.get(name) != own.get(name):
            return f"is of another model: {name} is {config.get(name)!r} there, but {own.get(name)!r} here"
    if theirs.get("dtype") != ours["dtype"]:
        return f"is of a model in {theirs.get('dtype')}, but this one is in {ours['dtype']}"
    if theirs.get("weights") != ours["weights"]:
        return "is of a model with other weights"
    return None


def _weights(model: nn.Module) -> str:
    tensors, told = model.state_dict(keep_vars=True), json.dumps(adapters(model), default=str)
    if away := [name for name, t in tensors.items() if t.is_meta]:
        raise ValueError(f"the weights of {away[0]!r} are not in memory, so the model of the state cannot be identified")
    known, marks = _KNOWN.get(model), _marks(tensors.values())
    if known is not None and marks is not None and known[0] == (told, marks):
        return known[1]
    digest = hashlib.sha256(told.encode())
    for name in sorted(tensors):
        t = tensors[name].detach()
        digest.update(json.dumps([name, str(t.dtype), list(t.shape)]).encode())
        digest.update(_bytes(t))
    _KNOWN[model] = (told, marks), digest.hexdigest()
    return digest.hexdigest()


def _marks(tensors: Collection[Tensor]) -> list[tuple[int, int, int]] | None:
    """Key that changes when one of ``tensors`` is replaced or written to; None if versions are not tracked.

    Writes to a tensor's ``data`` change no version; a sum of bits, twenty times as fast as a hash, detects them.
    """
    if any(t.is_inference() for t in tensors):
        return None
    return [(t.data_ptr(), t._version, total) for t, total in zip(tensors, sums_of_bits(tensors), strict=True)]


def sums_of_bits(tensors: Collection[Tensor]) -> list[int]:
    """Sum the bits of each tensor as 64-bit integers, and the remaining bytes."""
    sums = [_sum(t) for t in tensors]
    return [int(total) for total in sums]  # a GPU computes all of them before the first synchronisation


def _sum(t: Tensor) -> Tensor:
    memory = t.detach().contiguous().reshape(-1).view(torch.uint8)
    memory = memory.clone() if memory.storage_offset() % 8 else memory
    words, rest = memory.tensor_split([memory.numel() // 8 * 8])
    return words.view(torch.int64).sum() + rest.sum() if rest.numel() else words.view(torch.int64).sum()


def adapters(model: nn.Module) -> list[list[Any]]:
    """Settings of PEFT layers besides their weights: active adapters and their scales."""
    names = "disable_adapters", "active_adapters", "merged_adapters", "scaling"
    return [[name, *(getattr(m, n, None) for n in names)] for name, m in model.named_modules() if hasattr(m, names[2])]


def _bytes(t: Tensor) -> Any:
    """Memory of ``t`` as a buffer that hashes read without a copy."""
    return t.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
