"""Allowed outcomes of a call: a result, or a one-line error that names an argument."""

from __future__ import annotations

import linecache
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

import linattn

OURS = str(Path(linattn.__file__).parent)
KINDS = (ValueError, TypeError, IndexError, OSError, NotImplementedError)


def complaint(call: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[str, str | None]:
    """Outcome of ``call(**arguments)``, "result" or "refused", and its defect; None if there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call(**arguments)
    except AssertionError:  # report of check_forms
        return "result", None
    except Exception as error:
        return "refused", wrong(error, arguments)
    return "result", None


def wrong(error: Exception, arguments: Mapping[str, Any]) -> str | None:
    """Reason why callers should not get ``error``, or None."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    place = next((f for f in reversed(frames) if f.filename.startswith(OURS)), last)
    told = f"{type(error).__name__} in {Path(place.filename).name}:{place.name}: {str(error).splitlines()[:1]}"
    if not isinstance(error, KINDS):
        return f"no error of ours: {told}"
    raised = _statement(last)
    if isinstance(error, OSError) and error.filename is not None:
        return None  # the system's error, which names the file
    if not last.filename.startswith(OURS) or not raised.startswith("raise "):
        return f"not raised by us: {told}"
    if "\n" in str(error):
        return f"more than a line: {told}"
    if not isinstance(error, OSError) and not _named(str(error), arguments):
        return f"names no argument: {told}"
    return None


def _statement(frame: traceback.FrameSummary) -> str:
    return linecache.getline(frame.filename, frame.lineno or 0).strip()


def _named(message: str, arguments: Mapping[str, Any]) -> bool:
    """True if ``message`` names one of ``arguments`` or an option, or quotes a value."""
    if re.match(r"(layer \d+'s )?[\w\[\]'.]+( \(\w+\))? (must|may) ", message):
        return True
    if any(re.search(rf"(?<![a-z_]){re.escape(name)}(?![a-z])", message) for name in _names(arguments)):
        return True
    came = [value for value in arguments.values() if not isinstance(value, Tensor)]
    return any((str(value) or "''") in message or repr(value) in message for value in came)


def _names(arguments: Mapping[Any, Any]) -> Iterator[str]:
    for name, value in arguments.items():
        yield str(name) or "no name"
        if isinstance(value, dict):
            yield from _names(value)
