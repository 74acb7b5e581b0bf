"""Speed and state size during generation, and afterwards."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from linattn.generate.tokens import Tokens

_EVERY = 0.1  # seconds between updates


class Status:
    """Status line with tokens/s and bytes of the state: the last line of a terminal during generation, and on stderr at the end.

    ``with Status() as status: for token in status.watch(tokens): ...``
    """

    def __init__(self) -> None:
        self._live = sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._rows = shutil.get_terminal_size().lines
        self._count, self._bytes = 0, 0
        self._first = self._last = self._shown = 0.0

    def __enter__(self) -> Self:
        if self._live:  # reserve the last line and scroll the others; \x1b7 and \x1b8 save and restore the cursor
            self._write(f"\n\x1b[A\x1b7\x1b[1;{self._rows - 1}r\x1b8")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._write(f"\x1b7\x1b[r\x1b[{self._rows};1H\x1b[K\x1b8")
        if kind is None:
            sys.stdout.flush()
            print(self.text, file=sys.stderr)

    def watch(self, tokens: Tokens) -> Iterator[int]:
        """Yield and count ``tokens``."""
        for token in tokens:
            now = time.perf_counter()
            self._first, self._last = self._first or now, now
            self._count, self._bytes = self._count + 1, tokens.nbytes
            if self._live and now - self._shown >= _EVERY:
                self._write(f"\x1b7\x1b[{self._rows};1H\x1b[K{self.text}\x1b8")
                self._shown = now
            yield token

    @property
    def text(self) -> str:
        """The line itself. The speed excludes the first token, whose time includes the prompt."""
        seconds = self._last - self._first
        speed = f", {(self._count - 1) / seconds:,.0f} tokens/s" if seconds > 0 else ""
        state = f", state {self._bytes:,} bytes" if self._count else ""
        return f"{self._count:,} token{'' if self._count == 1 else 's'}{speed}{state}"

    def _write(self, codes: str) -> None:
        sys.stdout.write(codes)
        sys.stdout.flush()
