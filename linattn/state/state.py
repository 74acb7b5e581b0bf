"""State of a model as one value: selection and forking of rows, moves between devices, safe files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from linattn.arguments import described, known_device, typed, whole
from linattn.ops.checks import tensor, values_visible
from linattn.state.checksum import damage, save_tensors
from linattn.state.identity import difference, identity

FORMAT, VERSION = "linattn.State", 1
_LARGEST = 2**48  # bytes: the address space of processors


class State:
    """State of a model for its sequences: for each layer a dict of tensors whose first dimension is the rows.

    A layer without memory (a feed-forward) is an empty dict. Every method returns a new state; the tensors of a state are
    never written to, so it can be continued repeatedly.
    """

    layers: tuple[dict[str, Tensor], ...]

    def __init__(self, layers: Iterable[Mapping[str, Tensor]]) -> None:
        """Raise ValueError if the tensors disagree about the number of rows, TypeError for a value that is no tensor."""
        try:
            self.layers = tuple(dict(layer) for layer in layers)
        except (TypeError, ValueError):
            raise TypeError(f"layers must be a list of dicts of tensors, one for each layer, but came as {described(layers)}") from None
        rows = None
        for i, layer in enumerate(self.layers):
            for name, t in layer.items():
                if not isinstance(t, Tensor):
                    raise TypeError(f"layer {i}'s {name!r} must be a tensor, but came as {type(t).__name__}")
                rows = _rows(f"layer {i}'s {name!r}", t.shape, rows)

    @property
    def rows(self) -> int:
        """Number of sequences; 0 for a state without tensors."""
        return next((t.shape[0] for layer in self.layers for t in layer.values()), 0)

    @property
    def position(self) -> Tensor:
        """Number of tokens read of each sequence, [rows] int64."""
        for layer in self.layers:
            if "position" in layer:
                return layer["position"]
        raise ValueError("no layer of this state keeps a position")

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in layer.values())

    def select(self, rows: Tensor | Sequence[int]) -> State:
        """Select the sequences ``rows`` [n] (integers, in that order, repeats allowed): beam search, finished sequences."""
        try:
            index = torch.as_tensor(rows)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"rows must be integers of shape [n], but came as {described(rows)}") from None
        index = tensor("rows", index if index.numel() else index.long())  # an empty list has no integer dtype
        if index.is_meta and not all(t.is_meta for layer in self.layers for t in layer.values()):
            raise ValueError("rows must hold numbers, but is on meta")
        if index.ndim != 1 or index.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"rows must be integers of shape [n], but came as {index.dtype} {list(index.shape)}")
        if index.numel() and values_visible(index) and not 0 <= int(index.min()) <= int(index.max()) < self.rows:
            raise IndexError(f"rows must be from 0 to {self.rows - 1}, but came as {index.tolist()}")
        return self._map(lambda t: t.index_select(0, index.to(t.device)))

    def fork(self, n: int) -> State:
        """Repeat every sequence ``n`` times, copies side by side: row b becomes rows n·b .. n·b + n − 1."""
        whole("n", n, 1)
        if n * self.nbytes > _LARGEST:
            raise ValueError(f"n = {n} times {self.nbytes:,} bytes are more than any memory holds")
        return self._map(lambda t: t.repeat_interleave(n, 0))

    @staticmethod
    def cat(states: Sequence[State]) -> State:
        """Concatenate the rows of several states of one model.

        Raises:
            ValueError: if tensors differ in more than their rows, as those of layers with a cache do after different numbers
                of tokens.
        """
        if not isinstance(states, (list, tuple)) or not all(isinstance(s, State) for s in states):
            raise TypeError(f"states must be a list of linattn.State, but came as {described(states)}")
        if not states:
            raise ValueError("states must hold at least one state, but came empty")
        first, *rest = states
        for other in rest:
            if [(k, t.shape[1:], t.dtype) for k, t in _named(first)] != [(k, t.shape[1:], t.dtype) for k, t in _named(other)]:
                raise ValueError("states must have tensors of equal names, dtypes and sizes except rows")
        parts = zip(*(s.layers for s in states), strict=True)
        return State([{name: torch.cat([p[name] for p in layers]) for name in layers[0]} for layers in parts])

    def clone(self) -> State:
        """Copy the state into memory of its own."""
        return self._map(torch.clone)

    def to(self, *targets: torch.device | str | torch.dtype) -> State:
        """Move to another device, precision, or both: ``state.to("cuda", torch.float64)``. Integers stay integers.

        The recurrence keeps its states in float32 or float64 whatever the model's dtype, so only these two are admitted.
        """
        for target in targets:
            if not isinstance(target, torch.dtype):
                known_device("targets", target)
            elif target not in (torch.float32, torch.float64):
                raise ValueError(f"targets must be torch.float32 or torch.float64 as dtype, but came as {target}")
        return self._map(lambda t: _moved(t, targets))

    @typed
    def save(
        self,
        path: str | os.PathLike[str],
        *,
        model: nn.Module | Mapping[str, Any] | None = None,
        description: Mapping[str, Any] | None = None,
    ) -> None:
        """Write one safetensors file with a checksum, atomically.

        Args:
            path: the file; an old one is replaced.
            model: the model whose state this is: its configuration, its dtype and a hash of its weights go into the file. Or the model's
                identity, as ``linattn.state.identity.identity`` returns it.
            description: JSON values that identify the state further; :meth:`load` can require them.
        """
        header = {"format": FORMAT, "version": VERSION, "layers": _names(self), "description": dict(description or {})}
        header |= {} if model is None else {"model": _identity(model)}
        try:
            text = json.dumps(header, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"description must be JSON values, but: {error}") from None
        save_tensors(Path(path), {key: _copied(t) for key, t in _named(self)}, {"linattn": text})

    @classmethod
    @typed
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        model: nn.Module | Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        description: Mapping[str, Any] | None = None,
    ) -> State:
        """Read a file of :meth:`save`. No code in the file is run and nothing is read before the header is checked.

        Args:
            path: the file.
            model: if given, a model or its identity: the file must have been saved with one of the same configuration, dtype and weights.
            device: device of the tensors; None: the model's, or the host.
            description: if given, the file must have been saved with an equal one.

        Raises:
            OSError: if there is no such file or it cannot be read.
            ValueError: if it is damaged (its checksum is compared, where it has one), holds something else, is of another version or
                model, or does not match ``description``.
        """
        from safetensors import SafetensorError, safe_open

        path = Path(path)
        if device is not None:
            known_device("device", device)
        else:
            device = next(model.parameters()).device if isinstance(model, nn.Module) else "cpu"
        with path.open("rb"):  # errors of safetensors do not name the file
            pass
        try:
            with safe_open(path, framework="pt") as file:
                if problem := damage(path, file.metadata()):
                    raise ValueError(problem)
                layers = _checked(file, model, description)
                return cls({name: file.get_tensor(_key(i, name)).to(device, copy=True) for name in names} for i, names in enumerate(layers))
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or not a safetensors file: {error}") from None
        except ValueError as error:
            raise ValueError(f"{path} {error}") from None

    def _map(self, function: Callable[[Tensor], Tensor]) -> State:
        return State([{name: function(t) for name, t in layer.items()} for layer in self.layers])

    def __repr__(self) -> str:
        return f"State(layers={len(self.layers)}, rows={self.rows}, nbytes={self.nbytes})"


def _rows(what: str, shape: Sequence[int], rows: int | None) -> int:
    if not len(shape) or (rows is not None and shape[0] != rows):
        wanted = "rows first" if rows is None else f"{rows} rows like the others"
        raise ValueError(f"{what} must have {wanted}, but has shape {list(shape)}")
    return shape[0]


def _moved(t: Tensor, targets: tuple[torch.device | str | torch.dtype, ...]) -> Tensor:
    for target in targets:
        if not isinstance(target, torch.dtype) or t.is_floating_point():
            t = t.to(target)
    return t


def _copied(t: Tensor) -> Tensor:
    """Copy to the host's memory, contiguous and unshared, as safetensors needs each tensor."""
    return t.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _names(state: State) -> list[list[str]]:
    return [list(layer) for layer in state.layers]


def _named(state: State) -> list[tuple[str, Tensor]]:
    return [(_key(i, name), t) for i, layer in enumerate(state.layers) for name, t in layer.items()]


def _key(layer: int, name: str) -> str:
    return f"{layer}.{name}"


def _identity(model: nn.Module | Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(model, Mapping):
        return identity(model)
    if not {"config", "dtype", "weights"} <= model.keys() or not isinstance(model["config"], Mapping):
        raise ValueError(f"model must be a model or the identity of one, but came as {described(dict(model))}")
    return dict(model)


def _checked(file: Any, model: nn.Module | Mapping[str, Any] | None, description: Mapping[str, Any] | None) -> list[list[str]]:
    """Check the header and all shapes; returns the names of each layer's tensors. Errors are worded to follow the path."""
    header = _header((file.metadata() or {}).get("linattn"))
    if header.get("version") != VERSION:
        raise ValueError(f"has version {header.get('version')!r} of the format, but this linattn reads version {VERSION}")
    other = None if model is None else difference(header.get("model"), _identity(model))
    if other is not None:
        raise ValueError(other)
    layers = header.get("layers")
    if not isinstance(layers, list) or not all(isinstance(n, list) and all(isinstance(s, str) for s in n) for n in layers):
        raise ValueError("has a header without tensor names")
    if sorted(file.keys()) != sorted(_key(i, name) for i, names in enumerate(layers) for name in names):
        raise ValueError("has tensors that differ from those in its header")
    rows = None
    for key in sorted(file.keys()):
        rows = _rows(f"does not fit: {key!r}", file.get_slice(key).get_shape(), rows)
    try:
        wanted = None if description is None else json.loads(json.dumps(dict(description)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"cannot be compared: description must be JSON values, but: {error}") from None
    if wanted is not None and header.get("description") != wanted:
        raise ValueError(f"belongs to {json.dumps(header.get('description'))}, but {json.dumps(wanted)} was wanted")
    return layers


def _header(text: str | None) -> dict[str, Any]:
    try:
        header = json.loads(text or "")
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError("holds no state of a linattn model")
    return header


def _flatten(state: State) -> tuple[list[Tensor], list[list[str]]]:
    return [t for _, t in _named(state)], _names(state)


def _unflatten(leaves: Iterable[Any], names: list[list[str]]) -> State:
    leaves = iter(leaves)  # unchecked, since transforms also build trees of other things than tensors
    state = object.__new__(State)
    state.layers = tuple({name: next(leaves) for name in layer} for layer in names)
    return state


def _flatten_with_keys(state: State) -> tuple[list[tuple[Any, Tensor]], list[list[str]]]:
    return [(pytree.MappingKey(key), t) for key, t in _named(state)], _names(state)


pytree.register_pytree_node(
    State, _flatten, _unflatten, serialized_type_name=FORMAT, flatten_with_keys_fn=_flatten_with_keys
)  # so that compile, export and functional transforms see the tensors inside
