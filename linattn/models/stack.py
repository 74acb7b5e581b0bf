"""What models of other things than text share: residual branches, and the checks of a stack's config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from linattn import ffn, mixers
from linattn.mixers.registry import Info
from linattn.models.config import check_known


class Residual(nn.Module):
    """x + f(norm(x)), of what comes out a share zeroed while it learns (SASRec, arXiv 1808.09781, section 3.2)."""

    def __init__(self, branch: nn.Module, dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.branch, self.dropout = nn.LayerNorm(dim), branch, nn.Dropout(dropout)

    def forward(self, x: Tensor, *others: Any, **how: Any) -> Any:
        """As the branch itself: with its state, where one is asked for."""
        y = self.branch(self.norm(x), *others, **how)
        if isinstance(y, tuple):
            return x + self.dropout(y[0]), *y[1:]
        return x + self.dropout(y)


def sequence_mixer(name: str, *, dim: int, causal: bool, **options: Any) -> mixers.Mixer:
    """The mixer ``name`` of sequences, causal or reading both ways."""
    return mixers.create(name, dim=dim, **options) if causal else mixers.create_bidirectional(name, dim=dim, **options)


def sequence_misfit(causal: bool) -> Callable[[Info], str | None]:
    """What is wrong with a mixer where one of sequences is wanted, causal or not; None: nothing."""

    def misfit(known: Info) -> str | None:
        if known.kind != "sequence":
            return f"is of the kind {known.kind}"
        if known.cls.shares:
            return "passes a tensor on from layer to layer"
        return None if (known.resumable if causal else known.bidirectional) else "is causal" if known.causal else "reads both ways"

    return misfit


def check_whole(**numbers: Any) -> None:
    """Refuse what is no integer of at least 1."""
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, but came as {value!r}")


def check_dropout(value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
        raise ValueError(f"dropout must be a share from 0 to below 1, but came as {value!r}")


def check_mixers(argument: str, names: Iterable[str], wanted: str, misfit: Callable[[Info], str | None]) -> None:
    """Refuse the first of ``names`` with which ``misfit`` finds something wrong."""
    for name in names:
        if (wrong := misfit(mixers.info(name))) is not None:
            raise ValueError(f"{argument}: {wanted}, but {name!r} {wrong}")


def check_ffns(names: Iterable[str]) -> None:
    """Refuse a feed-forward that there is none of."""
    for name in names:
        if name not in ffn.available():
            raise ValueError(f"ffn: no feed-forward is called {name!r}. There are: {', '.join(ffn.available())}")


def check_options(argument: str, given: Mapping[str, Any], used: Iterable[str], options: Callable[[str], list[str]]) -> None:
    """Refuse options of what is not ``used``, and options that do not exist."""
    used = list(dict.fromkeys(used))
    for name, own in given.items():
        if name not in used or name == ffn.NONE:
            raise ValueError(f"{argument} speaks of {name!r}, but there are {', '.join(used)}")
        check_known(f"{argument}[{name!r}]", name, own, options(name))
