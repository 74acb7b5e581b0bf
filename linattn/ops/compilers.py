"""Attributes of functions that torch's compilers read, set without importing torch._dynamo, which takes a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def constant_result(function: F) -> F:
    """Mark ``function`` as returning a constant, as ``torch.compiler.assume_constant_result`` does."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def exporting() -> bool:
    """True while ``torch.export`` is tracing.

    ``torch.compiler.is_exporting()`` is True in every graph that torch 2.11 compiles; the underlying flag is not.
    """
    return torch.compiler._is_exporting_flag
