"""Families of GGUF files that are read as models of this library: the config, and the tensors under our names.

The inverse of :mod:`linattn.hf.gguf.families`. Names and shapes are compared with those written for the config before a tensor is
read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from linattn import models
from linattn.hf.folder import Weights, listed
from linattn.hf.gguf import families, kimi, minimax, qwen
from linattn.hf.gguf.file import GGUFFile
from linattn.models import LMConfig

Read = Callable[[str], Tensor]  # name -> tensor of the file
Named = tuple[str, Tensor]


def _wkv(metadata: Any, mixer: str, options: dict[str, Any], gated: bool) -> dict[str, Any]:
    time = {"head_size": metadata.count("wkv.head_size"), "eps": 64e-5, **options}
    channel = {"hidden": metadata.count("feed_forward_length"), "gated": gated}
    return {
        "layers": 2 * metadata.count("block_count"), "mixer": f"{mixer}, rwkv_channel", "ffn": "none", "norm": "layer",
        "norm_eps": metadata.number("attention.layer_norm_epsilon"), "embedding_norm": True,
        "mixer_options": {mixer: time, "rwkv_channel": channel},
    }  # fmt: skip


def _rwkv6(metadata: Any) -> dict[str, Any]:
    if metadata.get("rescale_every_n_layers", 0):
        raise ValueError("rwkv6.rescale_every_n_layers must be 0 to be read")
    ranks = {"mix_rank": metadata.count("time_mix_extra_dim"), "decay_rank": metadata.count("time_decay_extra_dim")}
    return _wkv(metadata, "rwkv6", ranks, True)


def _rwkv7(metadata: Any) -> dict[str, Any]:
    ranks = {letter: metadata.count(f"attention.{name}_lora_rank") for letter, name in families.LOW_RANKS.items()}
    return _wkv(metadata, "rwkv7", {"rank": ranks}, False)


def _read_rwkv(ours: LMConfig, read: Read, time: Callable[[int, str, Read], Iterator[Named]], gated: bool) -> Iterator[Named]:
    for theirs, name in families.rwkv_norms(ours):
        for part in (".weight", ".bias"):
            yield name + part, read(theirs + part)
    for i in range(ours.layers // 2):
        there, first, second = f"blk.{i}.", f"model.layers.{2 * i}.mixer.", f"model.layers.{2 * i + 1}.mixer."
        for name, theirs in families.RWKV_TIME.items():
            yield f"{first}{name}.weight", read(f"{there}time_mix_{theirs}.weight")
        for name, tensor in time(i, f"{there}time_mix_", read):
            yield first + name, tensor
        yield second + "time_mix_key", 1 - read(there + "channel_mix_lerp_k.weight").flatten()
        yield second + "k_proj.weight", read(there + "channel_mix_key.weight")
        yield second + "o_proj.weight", read(there + "channel_mix_value.weight")
        if gated:
            yield second + "time_mix_receptance", 1 - read(there + "channel_mix_lerp_r.weight").flatten()
            yield second + "r_proj.weight", read(there + "channel_mix_receptance.weight")


def _read_time6(_: int, there: str, read: Read) -> Iterator[Named]:
    yield "g_proj.weight", read(there + "gate.weight")
    yield "time_maa_x", read(there + "lerp_x.weight").flatten()
    for letter, mix in zip("wkvrg", read(there + "lerp_fused.weight").unbind(), strict=True):
        yield f"time_maa_{letter}", mix.flatten()
    for name, theirs in (("maa_w1", "w1"), ("maa_w2", "w2"), ("decay_w1", "decay_w1"), ("decay_w2", "decay_w2")):
        yield f"time_{name}", read(f"{there}{theirs}.weight").mT
    yield "time_faaaa", read(there + "first.weight")
    yield "time_decay", read(there + "decay.weight").flatten()


def _read_time7(block: int, there: str, read: Read) -> Iterator[Named]:
    for letter, mix in zip("rwkvag", read(there + "lerp_fused.weight").unbind(), strict=True):
        yield f"x_{letter}", mix.flatten()
    for letter in "wavg" if block else "wag":  # the first block's maps of the value's residual are not used
        for part in "12" if letter == "g" else "012":
            t = read(f"{there}{letter}{part}.weight")
            yield f"{letter}{part}", t.flatten() if part == "0" else t.mT
    for name in ("k_k", "k_a", "r_k"):
        yield name, read(f"{there}{name}.weight")


CONFIGS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "rwkv6": _rwkv6, "rwkv7": _rwkv7, "qwen3next": qwen.fields, "kimi-linear": kimi.fields, "minimax-01": minimax.fields,
}  # fmt: skip
_READ: dict[str, Callable[[LMConfig, Read], Iterator[Named]]] = {
    "rwkv6": lambda ours, read: _read_rwkv(ours, read, _read_time6, True),
    "rwkv7": lambda ours, read: _read_rwkv(ours, read, _read_time7, False),
    "qwen3next": qwen.read,
    "kimi-linear": kimi.read,
    "minimax-01": minimax.read,
}  # fmt: skip


class OwnWeights(Weights):
    """Weights of ``file`` under our names, for the model of the config ``ours``."""

    def __init__(self, file: GGUFFile, architecture: str, ours: LMConfig) -> None:
        with torch.device("meta"):
            hollow = models.LanguageModel(ours).state_dict()
        written = families.FAMILIES[architecture]
        head = {} if ours.tie_embeddings else {"output.weight": hollow["lm_head.weight"]}
        wanted = {"token_embd.weight": hollow["model.embedding.weight"], **head, **dict(written.tensors(ours, hollow))}
        _compare(file, {name: tuple(t.shape) for name, t in wanted.items()})
        self._tensors = {"model.embedding.weight": file.tensor("token_embd.weight")}
        if head:
            self._tensors["lm_head.weight"] = file.tensor("output.weight")
        self._tensors |= {name: t.reshape(hollow[name].shape).contiguous() for name, t in _READ[architecture](ours, file.tensor)}

    @property
    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]


def _compare(file: GGUFFile, wanted: dict[str, tuple[int, ...]]) -> None:
    """Raise ValueError unless the file's tensors have the names and, up to dimensions of size 1, the shapes of ``wanted``."""
    there = {name: _plain(stored.shape) for name, stored in file.tensors.items()}
    wrong = [name for name in there.keys() & wanted.keys() if there[name] != _plain(wanted[name])]
    found = {"missing": wanted.keys() - there.keys(), "not expected": there.keys() - wanted.keys(), "of another shape": wrong}
    if any(found.values()):
        told = ". ".join(f"{kind[0].upper()}{kind[1:]}: {listed(sorted(names))}" for kind, names in found.items() if names)
        raise ValueError(f"the tensors do not fit the metadata. {told}")


def _plain(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)
