"""Checks of arguments against their annotations: one error line with the argument's name, the value given and the values allowed.

For functions that are called rarely. The ops, which run for every token, have their own checks (:mod:`linattn.ops.checks`).
"""

from __future__ import annotations

import difflib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, wraps
from numbers import Integral, Real
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

Function = TypeVar("Function", bound=Callable[..., Any])
Default = TypeVar("Default")
Kind = tuple[str, tuple[type, ...]]  # description and classes

_KINDS: dict[str, Kind] = {
    "int": ("an integer", (Integral,)),
    "float": ("a number", (Real,)),
    "bool": ("True or False", (bool,)),
    "str": ("a string", (str,)),
    "None": ("None", (type(None),)),
    "Path": ("a path", (str, os.PathLike)),
    "os.PathLike[str]": ("a path", (os.PathLike,)),
}
_OF_TORCH = {"Tensor": "Tensor", "torch.dtype": "dtype", "torch.device": "device", "torch.Generator": "Generator", "nn.Module": "nn.Module"}
_TOO_MUCH = (
    "allocate memory",
    "out of memory",
    "Storage size calculation overflowed",
    "Overflow when unpacking",
    "too large to be represented",
)
_LISTS = ("Sequence", "list", "tuple", "Iterable", "Collection")
_DICTS = ("dict", "Mapping")


def typed(function: Function) -> Function:
    """Decorate ``function`` to check the arguments of every call by its annotations; unsupported ones admit any value.

    Raises:
        TypeError: in the call, for the first argument of another type.
    """
    signature = inspect.signature(function)
    annotations = {name: written(p.annotation) for name, p in signature.parameters.items()}

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name, value in _bound(signature, args, kwargs).items():
            if (error := mismatch(name, value, annotations[name], function.__globals__)) is not None:
                raise TypeError(error)
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


@dataclass(frozen=True)
class Option:
    """Metadata of a dataclass's field for the command line and the checks; see :func:`option`."""

    text: str
    metavar: str | None
    shown: str | None
    separated: bool
    least: int | None


def option(
    default: Default,
    text: str = "",
    metavar: str | None = None,
    *,
    shown: str | None = None,
    separated: bool = False,
    least: int | None = None,
) -> Default:
    """Make a field of a dataclass of options, which is also a command-line option if it has a ``text``.

    Args:
        default: default of the field; a dict is copied for each instance, and given on the command line as ``name.option=value``.
        text: the option's help.
        metavar: name of the value in the help; None for a flag.
        shown: description of the default in the help, in place of its value.
        separated: takes the values of a tuple from one argument with commas between them, not from an option each.
        least: the smallest value, checked by :func:`check_fields`.
    """
    metadata = {"option": Option(text, metavar, shown, separated, least)}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)  # type: ignore[return-value]
    return field(default=default, metadata=metadata)


def check_fields(options: Any, namespace: Mapping[str, Any] | None = None) -> None:
    """Check the fields of a dataclass by their annotations, and those made by :func:`option` by their bounds.

    Raises:
        ValueError: for the first field that is of another type or out of bounds.
    """
    for one in fields(options):
        value = getattr(options, one.name)
        if (error := mismatch(one.name, value, written(one.type), namespace or {})) is not None:
            raise ValueError(error)
        least = one.metadata["option"].least if "option" in one.metadata else None
        if least is not None and value is not None and value < least:
            raise ValueError(f"{one.name} must be at least {least}, but came as {value!r}")


def check_distinct(argument: str, names: Sequence[str]) -> None:
    """Raise ValueError for an empty or a repeating list of mixers.

    Raises:
        ValueError: naming ``argument``.
    """
    if not names:
        raise ValueError(f"{argument} must name at least one mixer, but came empty")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{argument} must name each mixer once, but {', '.join(twice)} came more than once")


def command_line(options: Any, names: Sequence[str], start: Any = None) -> list[str]:
    """Command-line arguments for the fields ``names`` of ``options``, without those that are None or equal in ``start``."""
    words: list[str] = []
    declared = {f.name: f.metadata.get("option") for f in fields(options)}
    for name in names:
        value, how = getattr(options, name), declared[name]
        if value is None or (start is not None and value == getattr(start, name)):
            continue
        if how is not None and how.separated:
            value = ",".join(map(str, value))
        for one in value if isinstance(value, tuple) else (value,):
            words += [f"--{name.replace('_', '-')}", *([] if one is True else [str(one)])]
    return words


def closest(name: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of ``known`` that ``name`` is most likely a misspelling of; None if none resembles it."""
    if not isinstance(name, str):  # names come from callers
        return None
    names, letters = [*known], sorted(name.casefold())
    swapped = [one for one in names if sorted(one.casefold()) == letters]
    return next(iter(swapped or difflib.get_close_matches(name, names, 1, cutoff)), None)


def suggestion(name: object, known: Iterable[str], otherwise: str = "") -> str:
    """End of an error on an unknown ``name``: ``"; did you mean 'gla'?"``, or ``otherwise`` (default: the known names) if none is close."""
    names = [*known]
    close = closest(name, names)
    return f"; did you mean {close!r}?" if close else otherwise or f"; the choices are: {', '.join(names) or 'none'}"


def mismatch(name: str, value: Any, annotation: str, namespace: Mapping[str, Any]) -> str | None:
    """Error line for an argument that does not fit ``annotation``; None if it fits or the annotation is not supported.

    ``namespace`` holds the classes that the annotation names. NaN is not accepted as a number.
    """
    if "PathLike" in annotation and isinstance(value, str) and "\0" in value:
        return f"{name} must be a path, but came as {described(value)}"
    kinds = [_kind(part, namespace) for part in _parts(annotation)]
    if any(kind is None for kind in kinds) or any(_fits(value, part, kind) for part, kind in zip(_parts(annotation), kinds, strict=True)):
        return None
    return f"{name} must be {' or '.join(dict.fromkeys(words for words, _ in filter(None, kinds)))}, but came as {described(value)}"


def written(annotation: Any) -> str:
    """Annotation as written in the source."""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def whole(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return ``value`` as an integer of at least ``low`` and at most ``high``.

    Raises:
        ValueError: if it is not one.
    """
    number = None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)
    if number is None or number < low or (high is not None and number > high):
        wanted = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be an integer {wanted}, but came as {described(value)}")
    return number


def absent(path: Path) -> str:
    """Error message for a model's ``path`` that does not exist, with what to give; a name of the Hugging Face Hub gets the command."""
    hub = len(path.parts) == 2 and not path.is_absolute() and not path.parent.exists()
    hint = f"; if it is a model of the Hugging Face Hub: hf download {path.as_posix()} --local-dir FOLDER, then give FOLDER"
    return f"{path} does not exist{hint if hub else '; give the folder of a run or of a published model, or a GGUF file'}"


def known_device(name: str, value: Any) -> torch.device:
    """Return ``value`` as a device.

    Raises:
        ValueError: if it does not name one.
    """
    import torch

    try:
        if isinstance(value, (str, torch.device)):
            return torch.device(value)
    except RuntimeError:
        pass
    raise ValueError(f"{name} must be a torch.device or the name of one, such as 'cpu' or 'cuda:0', but came as {described(value)}")


def beyond_memory(error: BaseException) -> bool:
    """True if ``error`` is Python's or torch's for sizes beyond memory or beyond a 64-bit integer."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in _TOO_MUCH)


def described(value: Any) -> str:
    """Describe a value on one line: a tensor by its dtype and shape, a long value by its type."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype}" + ("" if value.is_nested else f" {list(value.shape)}")
    text = (
        repr(value)
        if isinstance(value, (str, bytes, int, float, complex, list, tuple, dict, type(None))) or str(value).startswith("torch.")
        else ""
    )
    return text if 0 < len(text) <= 80 and "\n" not in text else f"a {type(value).__name__}"


def _bound(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, without ``*args`` and ``**kwargs``; empty if they do not fit, which the call itself reports."""
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return {}
    return {
        n: v
        for n, v in given.items()
        if signature.parameters[n].kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    }


@cache
def _parts(annotation: str) -> tuple[str, ...]:
    """Split ``"Tensor | dict[str, int | None]"`` into its two parts."""
    parts, depth = [""], 0
    for c in annotation:
        depth += (c == "[") - (c == "]")
        if c == "|" and not depth:
            parts.append("")
        else:
            parts[-1] += c
    return tuple(part.strip() for part in parts)


def _kind(part: str, namespace: Mapping[str, Any]) -> Kind | None:
    if part in _KINDS:
        return _KINDS[part]
    if part in _OF_TORCH:
        return _of_torch(part)
    base, _, inner = part.partition("[")
    if base in _LISTS:
        return f"a list{_of(inner)}", (list, tuple)
    if base in _DICTS:
        return "a dict", (Mapping,)
    named = namespace.get(part)
    return (f"a {named.__name__}", (named,)) if inspect.isclass(named) else None


@cache
def _of_torch(part: str) -> Kind:
    import torch  # on demand: checks of command-line options do not need it

    words = "a tensor" if part == "Tensor" else f"a {part.removeprefix('nn.')}".replace("Module", "module")
    return words, (attrgetter(_OF_TORCH[part])(torch),)


def _of(inner: str) -> str:
    words = {"int": " of integers", "float": " of numbers", "str": " of strings", "Tensor": " of tensors"}
    return words.get(_item(inner), "")


def _item(inner: str) -> str:
    """Cut ``"str | Path, ...]"`` to ``"str | Path"``."""
    return inner.removesuffix("]").removesuffix(", ...")


def _fits(value: Any, part: str, kind: Kind | None) -> bool:
    assert kind is not None
    _, classes = kind
    if isinstance(value, bool):
        return bool in classes
    if not isinstance(value, classes) or (isinstance(value, float) and value != value):
        return False
    base, _, inner = part.partition("[")
    if base in _LISTS and isinstance(value, Sequence):
        items = _item(inner)
        return all(mismatch("", item, items, {}) is None for item in value)
    return True
