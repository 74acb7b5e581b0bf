"""Marks that torch's compilers read on functions, set without importing torch._dynamo, which takes a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def constant_result(function: F) -> F:
    """``function`` itself, whose result is always the same: as ``torch.compiler.assume_constant_result``."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def exporting() -> bool:
    """True while ``torch.export`` is tracing.

    ``torch.compiler.is_exporting()`` is true in every graph that torch 2.11 compiles; the flag that it stands for is not.
    """
    return torch.compiler._is_exporting_flag
