"""Configurations of the kernels by properties of the call, from table.json, which ``python -m benchmarks.configurations`` writes.

For each kind of kernel the first row whose conditions a call meets is used. A condition names a property of the call and its value, or,
with ``_at_most`` or ``_at_least`` after the name, a bound. Nothing is tuned at run time.

The table was measured on an H200. cards.json has rows that take precedence on other cards, by ``generation`` (ten times the compute
capability) and ``shared`` (bytes of shared memory per program), found by compilation, see ``make test-targets``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from linattn.ops.gpu import INTERPRETER, Card

if TYPE_CHECKING:
    from linattn.ops.triton.plan import Family

PROGRAMS = 128  # about one per multiprocessor of the largest devices
SHORTEST = 512  # least tokens of a segment
LONG = 2048  # minimum of tokens of a segment if half of the programs read about as fast
FEWEST = 4  # minimum of segments of a divided sequence, as all but the last are read twice
PARTS = (2, 6, 1)  # parts of a segment whose cotangents of states share memory, by rule; the delta rule keeps what it prepares beside
PARTED = 8192  # chunks and heads from which on there are parts: in the last round of each some multiprocessors idle, 1 % of the time

NARROWEST = 64

PLAIN, DELTA, ERASE = range(3)
NONE, HEAD, CHANNEL = range(3)
RULES = ("plain", "delta", "erase")
DECAYS = ("none", "head", "channel")

FILE = Path(__file__).with_name("table.json")
CARDS = Path(__file__).with_name("cards.json")
Value = bool | int | str


class Config(NamedTuple):
    """Channels of a block of keys and of values (0: all), warps, and depth of the pipeline of loads.

    Triton 3.6 miscompiles narrow blocks of bfloat16 on Hopper: keys in blocks of 32 channels with four warps are read past the
    end of shared memory, and so is the state of more than 128 keys in blocks of 16 or 32 values. So blocks of bfloat16 have at
    least ``NARROWEST`` channels on both sides, also for smaller sizes.
    """

    bk: int = 0
    bv: int = 0
    warps: int = 4
    stages: int = 1


class Elementwise(NamedTuple):
    """Tokens of a span (a warp holds one), spans and channels of a tile, stages of loads, and the programs of a multiprocessor.

    Spans of packed sequences are a power of two, at most 32, for bit masks.
    """

    span: int
    spans: int
    channels: int
    stages: int
    programs: int


class Decode(NamedTuple):
    """Columns of a state per program, and elements of its tile per thread.

    Eight columns are a memory sector and give enough programs for a single sequence; longer pieces of rows are better with enough
    programs.
    """

    columns: int
    numbers: int


class Row(NamedTuple):
    """Conditions on a call, and the configuration of a call that meets them."""

    when: dict[str, Value]
    use: Config | Elementwise | Decode

    def takes(self, call: dict[str, Value]) -> bool:
        """True if ``call`` meets every condition; raises KeyError for a condition on a property that such calls lack."""
        return all(_met(name, wanted, call) for name, wanted in self.when.items())


def _met(name: str, wanted: Value, call: dict[str, Any]) -> bool:
    if name.endswith("_at_most"):
        return call[name.removesuffix("_at_most")] <= wanted
    if name.endswith("_at_least"):
        return call[name.removesuffix("_at_least")] >= wanted
    return call[name] == wanted


Rows = dict[str, tuple[Row, ...]]
KINDS: dict[str, type] = {
    "prepare": Config, "forward": Config, "backward": Config, "gradients": Config, "elementwise": Elementwise, "decode": Decode,
    "chain": Config, "unsettled": Config, "two_anchors": Config,
}  # fmt: skip
_installed: Rows | None = None


def read(path: Path = FILE) -> Rows:
    """Read the rows of a file, by kind of kernel."""
    kinds = json.loads(path.read_text(encoding="utf-8"))
    return {kind: tuple(Row(row["when"], KINDS[kind](**row["use"])) for row in rows) for kind, rows in kinds.items()}


def write(rows: Rows, path: Path = FILE) -> None:
    """Write ``rows``, one per line, without fields that are 0."""
    kinds = []
    for kind, of_kind in rows.items():
        lines = [json.dumps({"when": row.when, "use": {n: x for n, x in row.use._asdict().items() if x}}) for row in of_kind]
        kinds.append(f' "{kind}": [\n  ' + ",\n  ".join(lines) + "\n ]")
    path.write_text("{\n" + ",\n".join(kinds) + "\n}\n", encoding="utf-8", newline="\n")


def rows() -> Rows:
    """Rows in use: the file's, read at the first lookup, unless others were installed."""
    return _read() if _installed is None else _installed


_read = cache(read)


def install(other: Rows | None) -> None:
    """Look up ``other`` rows from now on, to measure them; None: the file's again."""
    global _installed
    _installed = other
    for lookup in KEPT.values():
        lookup.cache_clear()


def find(kind: str, call: dict[str, Value]) -> int:
    """Number of the row for a call; raises LookupError if there is none."""
    for number, row in enumerate(rows()[kind]):
        if row.takes(call):
            return number
    raise LookupError(f"{FILE.name} has no row under {kind!r} for {call}")


def of_card(kind: str, call: dict[str, Value], card: Card) -> Config | None:
    """Row of cards.json for a call on ``card``, or None; it does not apply while rows are installed for measurements."""
    if _installed is not None:
        return None
    call = {**call, "generation": card.generation, "shared": card.shared}
    return next((row.use for row in _read(CARDS).get(kind, ()) if row.takes(call)), None)  # type: ignore[return-value]


def chunk(half: bool) -> int:
    return 64 if half else 32


def _of_family(family: Family) -> dict[str, Value]:
    return {"rule": RULES[family.rule], "decay": DECAYS[family.decay], "before": family.before, "half": family.half}


@lru_cache(maxsize=4096)
def of_chunks(kind: str, family: Family, size_k: int | None = None, outputs: bool = False, card: Card = INTERPRETER) -> Config:
    """Configuration of a kernel of the chunked form; for a scan of the states also the size of keys, and whether it has outputs."""
    call = _of_family(family)
    if size_k is not None:
        call |= {"keys": size_k, "outputs": outputs}
    return of_card(kind, call, card) or rows()[kind][find(kind, call)].use  # type: ignore[return-value]


def _kept(size_k: int) -> Callable[..., Config]:
    """Compute :func:`of_chunks` without the cache if a size is a compiler's symbol, which has no hash."""
    return of_chunks if isinstance(size_k, int) else getattr(of_chunks, "__wrapped__", of_chunks)


def prepare(family: Family, card: Card = INTERPRETER) -> Config:
    return of_chunks("prepare", family, card=card)


def forward(family: Family, size_k: int, outputs: bool, card: Card = INTERPRETER) -> Config:
    return _kept(size_k)("forward", family, size_k, outputs, card)


def backward(family: Family, size_k: int, outputs: bool, card: Card = INTERPRETER) -> Config:
    return _kept(size_k)("backward", family, size_k, outputs, card)


def gradients(family: Family, card: Card = INTERPRETER) -> Config:
    return of_chunks("gradients", family, card=card)


def two_anchors(family: Family, card: Card = INTERPRETER) -> Config:
    """The gradients of chunks with two anchors: those of chunks with one, unless a card has a row of its own."""
    return of_card("two_anchors", _of_family(family), card) or gradients(family, card)


def unsettled(family: Family, card: Card = INTERPRETER) -> Config:
    return of_chunks("unsettled", family, card=card)


@lru_cache(maxsize=64)
def chain(erases: bool, card: Card) -> Config:
    """Stages of the kernel that joins segments; its blocks follow from the sizes."""
    return of_card("chain", {"erases": erases}, card) or Config(stages=3)


@lru_cache(maxsize=256)
def elementwise(short: bool, packed: bool, shared: bool, backward: bool, decay_bytes: int, value_bytes: int) -> Elementwise:
    """``shared``: programs share a chain of tokens, where long spans mean fewer synchronisations."""
    call = dict(short=short, packed=packed, shared=shared, backward=backward, decay_bytes=decay_bytes, value_bytes=value_bytes)
    return rows()["elementwise"][find("elementwise", call)].use  # type: ignore[return-value, arg-type]


@lru_cache(maxsize=4096)
def decode(columns: int) -> Decode:
    """Configuration for the number of columns of all states."""
    return rows()["decode"][find("decode", {"columns": columns})].use  # type: ignore[return-value]


KEPT = {"of_chunks": of_chunks, "elementwise": elementwise, "decode": decode, "chain": chain}  # functions with caches
