"""Parts of all models: the config of a stack of blocks, its checks, and residual branches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from linattn import ffn, mixers
from linattn.arguments import suggestion
from linattn.mixers.registry import Info
from linattn.models import pattern

Misfit = Callable[[Info], str | None]  # reason why a mixer is unsuitable; None: suitable
Config = TypeVar("Config", bound="StackConfig")

_EXAMPLES = {"mixer_options": '{"gla": {"heads": 8}}', "ffn_options": '{"experts": {"count": 8}}'}


@dataclass(kw_only=True)
class StackConfig:
    """Config of a stack of blocks, each of mixers and a feed-forward: the fields common to all models.

    Args:
        dim: width D of the model.
        layers: number of blocks.
        ffn: a pattern of feed-forward names, ``"none"`` among them; it repeats until the layers are filled.
        mixer_options: for each mixer name the options of its constructor, e.g. ``{"gla": {"heads": 8}}``.
        ffn_dim: inner width of the feed-forwards; None: the default of each (8/3 of dim for SwiGLU).
        ffn_options: for each feed-forward name the options of its constructor, e.g. ``{"experts": {"count": 8}}``; they
            override ``ffn_dim``.
    """

    dim: int = 64
    layers: int = 2
    ffn: str = "mlp"
    mixer_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    ffn_dim: int | None = None
    ffn_options: dict[str, dict[str, Any]] = field(default_factory=dict)

    SIZES: ClassVar[tuple[str, ...]] = ()  # further fields that are integers of at least 1

    def __post_init__(self) -> None:
        self.check()

    def names(self, role: str = "mixer") -> list[str]:
        """Expand the pattern in the field ``role`` to the name in each layer."""
        return pattern.fill(pattern.parse(getattr(self, role), role), self.layers)

    @property
    def mixer_names(self) -> list[str]:
        """Name of each layer's mixer."""
        return self.names("mixer")

    @property
    def ffn_names(self) -> list[str]:
        """Name of each layer's feed-forward."""
        return self.names("ffn")

    def options_of(self, layer: int) -> dict[str, Any]:
        """Options of the mixer of layer number ``layer``, with the defaults that its class has for that layer."""
        names = self.mixer_names
        name = names[layer]
        return mixers.info(name).cls.placed(names[:layer].count(name), names.count(name)) | self.mixer_options.get(name, {})

    def ffn_options_of(self, layer: int) -> dict[str, Any]:
        """Options of the feed-forward of layer number ``layer``."""
        return {"hidden": self.ffn_dim} | self.ffn_options.get(self.ffn_names[layer], {})

    def feed_forward(self, layer: int) -> nn.Module | None:
        """Create the feed-forward of layer number ``layer``; None for ``"none"``."""
        return ffn.create(self.ffn_names[layer], self.dim, **self.ffn_options_of(layer))

    def roles(self) -> dict[str, tuple[str, Misfit]]:
        """Kind of mixer that each field with a pattern of mixers expects, in words and as a test."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise ValueError or TypeError for invalid fields."""
        sizes = (*self.SIZES, "dim", "layers", *(() if self.ffn_dim is None else ("ffn_dim",)))
        check_whole(**{name: getattr(self, name) for name in sizes})
        ffns = pattern.parse(self.ffn, "ffn")
        for name in ffns:
            if name not in ffn.available():
                raise ValueError(f"ffn: no feed-forward is called {name!r}{suggestion(name, ffn.available())}")
        used: list[str] = []
        for role, (wanted, misfit) in self.roles().items():
            names = pattern.parse(getattr(self, role), role)
            for name in names:
                if (wrong := misfit(mixers.info(name))) is not None:
                    raise ValueError(f"{role}: {wanted}, but {name!r} {wrong}")
            used += names
        self._check_options("mixer_options", used, "the mixers are", lambda name: mixers.info(name).options)
        self._check_options("ffn_options", ffns, "the feed-forwards are", ffn.options)

    def _check_options(self, argument: str, used: Iterable[str], they: str, known: Callable[[str], list[str]]) -> None:
        """Raise ValueError for options of names that are not ``used``, and for unknown options."""
        given, used = getattr(self, argument), list(dict.fromkeys(used))
        if not isinstance(given, dict):
            raise TypeError(f"{argument} must be a dict such as {_EXAMPLES[argument]}, but came as {given!r}")
        for name, options in given.items():
            if name not in used or name == ffn.NONE:
                raise ValueError(f"{argument} names {name!r}, but {they} {', '.join(used)}")
            check_known(f"{argument}[{name!r}]", name, options, known(name))


def from_preset(cls: type[Config], presets: Mapping[str, Mapping[str, Any]], name: str, fields: dict[str, Any]) -> Config:
    """Build the config ``cls`` of the preset ``name``; ``fields`` override it, ``mixer_options`` are merged.

    Raises:
        ValueError: for an unknown name, listing the known ones.
    """
    if not isinstance(name, str) or name not in presets:
        raise ValueError(f"no preset is called {name!r}; there are {', '.join(sorted(presets))}")
    own = dict(presets[name])
    if "halves" in own:
        first, second = own.pop("halves")
        own["mixer"] = pattern.halves(first, second, fields.get("layers", cls.layers))
    options: dict[str, dict[str, Any]] = {mixer: dict(given) for mixer, given in own.get("mixer_options", {}).items()}
    asked = fields.pop("mixer_options", {})
    if not isinstance(asked, dict) or not all(isinstance(given, dict) for given in asked.values()):
        raise TypeError(f"mixer_options must be a dict such as {_EXAMPLES['mixer_options']}, but came as {asked!r}")
    for mixer, given in asked.items():
        options[mixer] = {**options.get(mixer, {}), **given}
    return cls(**{**own, **fields, "mixer_options": options})


class Residual(nn.Module):
    """Residual branch x + dropout(f(norm(x))) (SASRec, arXiv 1808.09781, section 3.2)."""

    def __init__(self, branch: nn.Module, dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.branch, self.dropout = nn.LayerNorm(dim), branch, nn.Dropout(dropout)

    def forward(self, x: Tensor, *others: Any, **how: Any) -> Any:
        """Run the branch: with its state, if one is requested."""
        y = self.branch(self.norm(x), *others, **how)
        if isinstance(y, tuple):
            return x + self.dropout(y[0]), *y[1:]
        return x + self.dropout(y)


def residual_ffn(config: StackConfig, layer: int, dropout: float) -> nn.Module:
    """Create the residual feed-forward of layer number ``layer``; the identity if it has none."""
    feed = config.feed_forward(layer)
    return nn.Identity() if feed is None else Residual(feed, config.dim, dropout)


def sequence_mixer(name: str, *, dim: int, causal: bool, **options: Any) -> mixers.Mixer:
    """Create the sequence mixer ``name``, causal or bidirectional."""
    return mixers.create(name, dim=dim, **options) if causal else mixers.create_bidirectional(name, dim=dim, **options)


def sequence_misfit(causal: bool) -> Misfit:
    """Build the test for sequence mixers, causal or bidirectional."""

    def misfit(known: Info) -> str | None:
        if known.kind != "sequence":
            return f"is of the kind {known.kind}"
        if known.cls.shares:
            return "passes a tensor on from layer to layer"
        return None if (known.resumable if causal else known.bidirectional) else "is causal" if known.causal else "is bidirectional"

    return misfit


def check_whole(**numbers: Any) -> None:
    """Raise ValueError unless all ``numbers`` are integers of at least 1."""
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, but came as {value!r}")


def check_dropout(value: Any) -> None:
    """Raise ValueError unless ``value`` is a share from 0 to below 1."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
        raise ValueError(f"dropout must be a share from 0 to below 1, but came as {value!r}")


def check_known(argument: str, name: str, options: Any, known: list[str]) -> None:
    """Raise unless ``options`` of ``name`` are a dict whose keys are among ``known``."""
    if not isinstance(options, dict):
        raise TypeError(f"{argument} must be a dict of options, but came as {options!r}")
    for option in options:
        if option not in known:
            raise ValueError(f"{argument}: {name} has no option {option!r}{suggestion(option, known)}")
