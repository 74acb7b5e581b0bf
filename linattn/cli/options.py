"""Options of a command from the fields of a dataclass: name, type, default and help are written once, beside the field."""

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
    """An option of a command: its parameter for typer, and what makes the field's value of what typer gives."""

    parameter: inspect.Parameter
    read: Callable[[Any], Any]


def shown(field: Field) -> str | None:
    """The default of ``field`` as the help shows it: its own words, else its value; None where the value is None."""
    option: Option = field.metadata["option"]
    return option.shown if option.shown is not None or field.default in (None, MISSING) else str(field.default)


def options_of(cls: type, *names: str, show: Callable[[Field], str | None] = shown, inline: bool = True) -> list[Derived]:
    """The options of a command from ``cls``, whose fields are made by :func:`linattn.arguments.option`.

    Args:
        cls: a dataclass.
        names: the fields that are wanted, in their order in the help; without them all that have a help.
        show: what the help says of a field's default; None: nothing.
        inline: whether that stands in the help's own sentence, or behind it in typer's brackets.
    """
    known = {f.name: f for f in fields(cls) if "option" in f.metadata and f.metadata["option"].text}
    hints = get_type_hints(cls)
    return [_derived(known[name], hints[name], show(known[name]), inline) for name in names or known]


def takes(*options: Derived) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: the command has ``options`` behind its own ones; its first argument is a dict of those that were given."""
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
    """False for what typer has in place of an option, flag or list of options that did not come."""
    return not (value is None or value is False or value == [])


def _derived(field: Field, hint: Any, default: str | None, inline: bool) -> Derived:
    option: Option = field.metadata["option"]
    kind, many = _kind(hint)
    if kind is bool:
        return Derived(_parameter(field.name, bool, False, typer.Option(f"--{field.name}", help=option.text)), bool)
    if kind is dict:
        words = typer.Option(f"--{field.name.removesuffix('s').replace('_', '-')}", metavar=option.metavar, help=option.text)
        return Derived(_parameter(field.name, list[str] | None, None, words), partial(_by_name, field.name))
    text = f"{option.text} [default: {default}]" if inline and default is not None else option.text
    shows = False if inline or default is None else default
    info = typer.Option(metavar=option.metavar, help=text, show_default=shows)
    if option.separated:
        return Derived(_parameter(field.name, str | None, None, info), partial(_separated, field.name, kind))
    if many:
        return Derived(_parameter(field.name, list[kind] | None, None, info), tuple)  # type: ignore[valid-type]
    return Derived(_parameter(field.name, kind | None, None, info), lambda value: value)


def _parameter(name: str, kind: Any, default: Any, info: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


def _kind(hint: Any) -> tuple[Any, bool]:
    """The class of what is typed, and whether there may be several: ``tuple[str | Path, ...]`` -> str, True."""
    if isinstance(hint, UnionType):
        return _kind(next(one for one in get_args(hint) if one is not NoneType))
    if get_origin(hint) is tuple:
        return _kind(get_args(hint)[0])[0], True
    return get_origin(hint) or hint, False


def _separated(name: str, kind: Callable[[str], Any], text: str) -> tuple[Any, ...]:
    """The values in ``text``, which has commas between them."""
    try:
        return tuple(kind(one.strip()) for one in text.split(",") if one.strip())
    except ValueError:
        numbers = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"--{name.replace('_', '-')} must be {numbers} with commas between them, but came as {text!r}") from None


def _by_name(name: str, words: list[str]) -> dict[str, dict[str, Any]]:
    """Options by name: ``["gla.heads=8"]`` -> ``{"gla": {"heads": 8}}``; values are JSON, or else strings."""
    found: dict[str, dict[str, Any]] = {}
    for word in words:
        place, equals, value = word.partition("=")
        owner, dot, key = place.strip().partition(".")
        if not (equals and dot and owner and key):
            raise ValueError(f"--{name.removesuffix('s').replace('_', '-')} must be such as gla.heads=8, but came as {word!r}")
        found.setdefault(owner, {})[key] = _value(value.strip())
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)
