"""Import of a wheel's modules with stubs for imports that are not installed and not called."""

from __future__ import annotations

import sys
from inspect import isfunction
from types import ModuleType

import pytest

from tests.oracles import wheels


class Anything:
    """Stub of a missing import: may be subscripted, as in annotations, compares as the latest version, and is an identity decorator."""

    def __new__(cls, *args, **kwargs):
        return args[0] if len(args) == 1 and isfunction(args[0]) and not kwargs else super().__new__(cls)

    def __init__(self, *args, **kwargs) -> None:
        pass

    def __class_getitem__(cls, item):
        return cls

    def __ge__(self, other) -> bool:
        return True


def module(requirement: str, file: str, **missing: str) -> ModuleType:
    """As :func:`wheels.module`, with stubs for ``missing`` modules (``__`` for a dot): names imported from them, separated by spaces."""
    with pytest.MonkeyPatch.context() as patch:
        for name, names in missing.items():
            parts = name.replace("__", ".").split(".")
            for i in range(1, len(parts) + 1):
                stand_in = ModuleType(".".join(parts[:i]))
                stand_in.__path__ = []
                for bound in names.split():
                    setattr(stand_in, bound, Anything)
                patch.setitem(sys.modules, stand_in.__name__, stand_in)
        return wheels.module(requirement, file)


def performer() -> ModuleType:
    return module(
        "performer-pytorch==1.1.4",
        "performer_pytorch/performer_pytorch.py",
        local_attention="LocalAttention",
        axial_positional_embedding="AxialPositionalEmbedding",
        performer_pytorch__reversible="ReversibleSequence SequentialSequence",
        distutils__version="LooseVersion",
    )


def linear_attention_transformer() -> ModuleType:
    return module(
        "linear-attention-transformer==0.19.1",
        "linear_attention_transformer/linear_attention_transformer.py",
        local_attention="LocalAttention",
        linformer="LinformerSelfAttention",
        product_key_memory="PKM",
        axial_positional_embedding="AxialPositionalEmbedding",
        linear_attention_transformer__reversible="ReversibleSequence SequentialSequence",
    )


def taylor_series() -> ModuleType:
    return module(
        "taylor-series-linear-attention==0.2.0",
        "taylor_series_linear_attention/attention.py",
        taylor_series_linear_attention__tensor_typing="Float Int Bool",
        rotary_embedding_torch="RotaryEmbedding",
    )
