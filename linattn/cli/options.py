"""Command-line options from the fields of a dataclass, where name, type, default and help are written once."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields
from functools import partial, wraps
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from linattn.arguments import Option


@dataclass(frozen=True)
class Derived:
    """A command-line option: its parameter for typer, and the conversion of typer's value to the field's value."""

    parameter: inspect.Parameter
    read: Callable[[Any], Any]


def shown(field: Field) -> str | None:
    """Format the default of ``field`` for the help: its description, else its value; None if the value is None or empty."""
    option: Option = field.metadata["option"]
    return option.shown if option.shown is not None or field.default in (None, MISSING, ()) else str(field.default)


def options_of(cls: type, *names: str, show: Callable[[Field], str | None] = shown) -> list[Derived]:
    """Derive command-line options from ``cls``, whose fields are made by :func:`linattn.arguments.option`.

    Args:
        cls: a dataclass.
        names: fields in the order of the help; none: all fields that have a help text.
        show: formats a field's default for the help; None omits it.
    """
    known = {f.name: f for f in fields(cls) if "option" in f.metadata and f.metadata["option"].text}
    hints = get_type_hints(cls)
    return [_derived(known[name], hints[name], show(known[name])) for name in names or known]


def takes(*options: Derived) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command to accept ``options`` after its own; its first parameter is a dict of those that were given."""
    readers = {option.parameter.name: option.read for option in options}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()

        @wraps(command)
        def called(**values: Any) -> None:
            given = {name: values.pop(name) for name in readers}
            command({name: readers[name](value) for name, value in given.items() if _was_given(value)}, **values)

        parameters = [*own, *(option.parameter for option in options)]
        called.__signature__ = inspect.Signature([p.replace(kind=p.KEYWORD_ONLY) for p in parameters])  # type: ignore[attr-defined]
        return called

    return decorate


def _was_given(value: Any) -> bool:
    """False for typer's value of an option, flag or list of options that was omitted."""
    return not (value is None or value is False or value == [])


def _derived(field: Field, hint: Any, default: str | None) -> Derived:
    option: Option = field.metadata["option"]
    kind, many = _kind(hint)
    if kind is bool:
        return Derived(_parameter(field.name, bool, False, typer.Option(f"--{field.name.replace('_', '-')}", help=option.text)), bool)
    if kind is dict:
        words = typer.Option(f"--{field.name.removesuffix('s').replace('_', '-')}", metavar=option.metavar, help=option.text)
        return Derived(_parameter(field.name, list[str] | None, None, words), partial(_by_name, field.name))
    text = option.text if default is None else f"{option.text} [default: {default}]"
    info = typer.Option(metavar=option.metavar, help=text, show_default=False)  # typer puts what is no plain value into parentheses
    if option.separated:
        return Derived(_parameter(field.name, str | None, None, info), partial(_separated, field.name, kind))
    if many:
        return Derived(_parameter(field.name, list[kind] | None, None, info), tuple)  # type: ignore[valid-type]
    return Derived(_parameter(field.name, kind | None, None, info), lambda value: value)


def _parameter(name: str, kind: Any, default: Any, info: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


def _kind(hint: Any) -> tuple[Any, bool]:
    """Class of an option's value, and True if it can be repeated: ``tuple[str | Path, ...]`` -> str, True."""
    if isinstance(hint, UnionType):
        return _kind(next(one for one in get_args(hint) if one is not NoneType))
    if get_origin(hint) is tuple:
        return _kind(get_args(hint)[0])[0], True
    return get_origin(hint) or hint, False


def _separated(name: str, kind: Callable[[str], Any], text: str) -> tuple[Any, ...]:
    """Parse comma-separated values."""
    try:
        return tuple(kind(one.strip()) for one in text.split(",") if one.strip())
    except ValueError:
        numbers = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"--{name.replace('_', '-')} must be {numbers} separated by commas, but came as {text!r}") from None


def _by_name(name: str, words: list[str]) -> dict[str, dict[str, Any]]:
    """Parse options of named parts: ``["gla.heads=8"]`` -> ``{"gla": {"heads": 8}}``; values are JSON, or else strings."""
    found: dict[str, dict[str, Any]] = {}
    for word in words:
        place, equals, value = word.partition("=")
        owner, dot, key = place.strip().partition(".")
        if not (equals and dot and owner and key):
            flag = f"--{name.removesuffix('s').replace('_', '-')}"
            raise ValueError(f"{flag} must have the form NAME.OPTION=VALUE, such as gla.heads=8, but came as {word!r}")
        found.setdefault(owner, {})[key] = _value(value.strip())
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)
