"""Arguments of a call to fla by name; arguments that no rule reads are refused."""

from __future__ import annotations

from inspect import Parameter, Signature
from typing import Any

from torch import Tensor

# Arguments of fla's kernels that change no result: chunk sizes, saved tensors, and assumptions about gates.
TUNING = frozenset({
    "checkpoint_level", "chunk_indices", "chunk_size", "cu_seqlens_cpu", "disable_recompute", "lower_bound", "max_num_seqs",
    "safe_gate", "use_graph",
})  # fmt: skip


class Refused(Exception):
    """Reason why a call goes to fla's own function."""


class Given:
    """Arguments by the parameter names of fla's function, with a record of those that a rule has read.

    Args:
        signature: of fla's function.
        args, kwargs: arguments of the call; those in ``**kwargs`` have their own names.

    Raises:
        TypeError: where they do not fit ``signature``, as the function itself would.
    """

    def __init__(self, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        self.values: dict[str, Any] = {}
        self.unread: set[str] = set()
        for name, value in bound.arguments.items():
            parameter = signature.parameters[name]
            if parameter.kind is Parameter.VAR_KEYWORD:
                self.values.update(value)
                self.unread.update(value)
                continue
            self.values[name] = value
            if isinstance(value, Tensor) or (value is not parameter.default and value != parameter.default):
                self.unread.add(name)

    def __call__(self, name: str, default: Any = None) -> Any:
        """Read an argument; ``default`` if fla's function has none of that name."""
        self.unread.discard(name)
        return self.values.get(name, default)

    def all_read(self) -> None:
        """Refuse the call if an argument that matters has not been read."""
        if rest := sorted(self.unread - TUNING):
            raise Refused(f"{', '.join(rest)}: linattn's op has no such argument")
