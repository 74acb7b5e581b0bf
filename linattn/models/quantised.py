"""Layers with quantised weights, in the place of linear layers and embeddings of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.models.language import Head
from linattn.ops import quantised as ops
from linattn.ops import tracing
from linattn.ops.torch.quantised import GROUPS, Quantised, dequantised

METHOD = "linattn"  # quant_method in a config.json
FORMATS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class Format:
    """Format of one weight [N, K]: ``"int8"`` with a scale per row, or ``"int4"`` with one per ``group`` of neighbours in a row.

    Rows ``kept`` = (first, last + 1) are not quantised.
    """

    to: str = "int8"
    group: int | None = None
    kept: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.to not in FORMATS:
            raise ValueError(f"to must be one of {', '.join(FORMATS)}, but came as {self.to!r}")
        if self.group not in (GROUPS if self.to == "int4" else (None,)):
            raise ValueError(f"group must be one of {', '.join(map(str, GROUPS))} for int4 and None for int8, but came as {self.group!r}")

    @classmethod
    def read(cls, name: str, content: Any) -> Self:
        """The format of ``name`` in a config.json; ValueError for anything else."""
        try:
            kept = content.get("kept")
            return cls(content["to"], content.get("group"), None if kept is None else (int(kept[0]), int(kept[1])))
        except (AttributeError, KeyError, TypeError, IndexError, ValueError) as error:
            raise ValueError(f"quantization_config cannot be understood: modules[{name!r}]: {error}") from None

    def written(self) -> dict[str, Any]:
        """Content for a config.json."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    def empty(self, rows: int, columns: int) -> Quantised:
        """A quantised matrix of zeros."""
        if self.group is None:
            return Quantised(torch.zeros(rows, columns, dtype=torch.int8), torch.zeros(rows, dtype=torch.float32))
        return Quantised(
            torch.full((rows, columns // 2), 8 | 8 << 4, dtype=torch.uint8), torch.zeros(rows, columns // self.group, dtype=torch.float16)
        )


class _Floats(Tensor):
    """Floats of a quantised weight. Values set in their ``data``, as a merge of adapters does, would be lost, and are refused."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # results are plain tensors

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, _: Tensor) -> None:
        raise TypeError(
            "a quantised weight cannot be changed: merge adapters into the model before quantisation, and quantise that (linattn.quantize)"
        )


class _Quantised(nn.Module):
    """Buffers ``codes`` and ``scale`` of a weight, and unquantised rows ``kept``; ``dtype`` is that of the dequantised weight.

    Conversions of a model's dtype change ``dtype`` and leave the scales.
    """

    codes: Tensor
    scale: Tensor

    def _begin(self, rows: int, columns: int, form: Format, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.format, self.dtype = form, dtype
        first, last = form.kept or (0, 0)
        if not 0 <= first <= last <= rows:
            raise ValueError(f"kept must be rows of {rows}, but came as {form.kept}")
        if form.group is not None and columns % form.group:
            raise ValueError(f"group must divide the {columns} columns of the weight, but came as {form.group}")
        self.kept = nn.Parameter(torch.empty(last - first, columns, dtype=dtype)) if form.kept else None
        for name, t in form.empty(rows - (last - first), columns)._asdict().items():
            self.register_buffer(name, t)

    @property
    def matrix(self) -> Quantised:
        """The rows that are quantised."""
        return Quantised(self.codes, self.scale)

    @property
    def weight(self) -> Tensor:
        """The whole weight [N, K] as floats, computed at each call."""
        floats = dequantised(*self.matrix, self.dtype)
        if self.kept is not None:
            first = cast(tuple[int, int], self.format.kept)[0]
            floats = torch.cat([floats[:first], self.kept, floats[first:]])
        return floats if tracing.traced(floats) else floats.as_subclass(_Floats)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        scale = self.scale
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=scale.device)).dtype

        def fixed(t: Tensor) -> Tensor:
            return t.to(fn(t).device) if t is scale else fn(t)

        return super()._apply(fixed, recurse)


class QuantisedLinear(_Quantised, nn.Linear):  # type: ignore[override]
    """``x Wᵀ + b`` with a quantised weight, frozen: gradients pass to x, b and the kept rows."""

    def __init__(self, in_features: int, out_features: int, form: Format, *, bias: bool = False, dtype: torch.dtype | None = None) -> None:
        dtype = dtype or torch.get_default_dtype()
        self._begin(out_features, in_features, form, dtype)
        self.in_features, self.out_features = in_features, out_features
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype)) if bias else None  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if self.kept is None:
            return ops.linear(x, self.matrix, self.bias)
        first = cast(tuple[int, int], self.format.kept)[0]
        y, kept = ops.linear(x, self.matrix), F.linear(x, self.kept.to(x.dtype))
        y = torch.cat([y[..., :first], kept, y[..., first:]] if first < y.shape[-1] else [y, kept], -1)
        return y if self.bias is None else y + self.bias

    def reset_parameters(self) -> None:
        """Do nothing, because the layer has no trained weights."""

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, {self.format}"


class QuantisedHead(Head, QuantisedLinear):  # type: ignore[override]
    """The output layer with a quantised weight, softly capped if the config says so."""

    def __init__(self, in_features: int, out_features: int, form: Format, *, dtype: torch.dtype | None = None) -> None:
        QuantisedLinear.__init__(self, in_features, out_features, form, dtype=dtype)
        self.soft_cap: float | None = None

    def tie(self, embedding: QuantisedEmbedding) -> None:
        """Share the matrix of ``embedding``; only the embedding is saved."""
        for name in ("codes", "scale"):
            self.register_buffer(name, getattr(embedding, name), persistent=False)


class QuantisedEmbedding(_Quantised):
    """Rows of a quantised matrix, in ``dtype``."""

    def __init__(self, num_embeddings: int, embedding_dim: int, form: Format, *, dtype: torch.dtype | None = None) -> None:
        self._begin(num_embeddings, embedding_dim, form, dtype or torch.get_default_dtype())
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim

    def forward(self, ids: Tensor) -> Tensor:
        return ops.rows(self.matrix, ids, self.dtype)


def quantisable(module: nn.Module) -> bool:
    """True for layers that have a quantised form; subclasses of linear layers have none, because they may compute something else."""
    return type(module) in (nn.Linear, nn.Embedding, Head)


def empty(old: nn.Module, form: Format) -> nn.Module:
    """A quantised layer of zeros in the place of ``old``, with its bias and kept rows."""
    weight = cast(Tensor, old.weight)
    rows, columns = weight.shape
    with torch.device(weight.device):
        new: Any
        if isinstance(old, nn.Embedding):
            new = QuantisedEmbedding(rows, columns, form, dtype=weight.dtype)
        elif isinstance(old, Head):
            new = QuantisedHead(columns, rows, form, dtype=weight.dtype)
            new.soft_cap = old.soft_cap
        else:
            new = QuantisedLinear(columns, rows, form, bias=old.bias is not None, dtype=weight.dtype)
            new.bias = cast(nn.Linear, old).bias
    if form.kept is not None:
        new.kept = nn.Parameter(weight.detach()[slice(*form.kept)].clone(), requires_grad=weight.requires_grad)
    return cast(nn.Module, new.train(old.training))


def replace(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put ``new`` in the place ``name`` of ``model``."""
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, new)


def formats(model: nn.Module) -> dict[str, Format]:
    """Formats of the quantised layers of ``model`` by name."""
    return {name: m.format for name, m in model.named_modules() if isinstance(m, _Quantised)}


def matrices(model: nn.Module) -> set[str]:
    """Names of the codes and scales of ``model``."""
    return {f"{name}.{own}" for name in formats(model) for own in Quantised._fields}


def tie(model: Any) -> None:
    """Tie head and embedding of ``model`` to one quantised matrix if its config says so."""
    embedding = model.model.embedding
    if hasattr(model, "lm_head") and model.config.tie_embeddings and isinstance(embedding, QuantisedEmbedding):
        if quantisable(model.lm_head):
            replace(model, "lm_head", empty(model.lm_head, embedding.format))
        model.lm_head.tie(embedding)


def config_of(model: nn.Module) -> dict[str, Any]:
    """The ``quantization_config`` of a config.json."""
    return {"quant_method": METHOD, "modules": {name: form.written() for name, form in formats(model).items()}}


def floats(model: nn.Module) -> dict[str, Tensor]:
    """The ``state_dict`` that ``model`` would have without quantisation: each quantised weight as floats."""
    state = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, _Quantised):
            state = {key: t for key, t in state.items() if key not in {f"{name}.{own}" for own in ("codes", "scale", "kept")}}
            state[f"{name}.weight"] = module.weight.detach()
    return state


def prepare(model: nn.Module, content: Mapping[str, Any]) -> None:
    """Replace layers of ``model`` as a ``quantization_config`` says, by zeros; a model without a head needs no format of it.

    Raises:
        ValueError: for a method or layers that are unknown.
    """
    for name, form in _formats_in(content):
        try:
            old = model.get_submodule(name)
        except AttributeError:
            if name == "lm_head":
                continue
            old = nn.Identity()
        if not quantisable(old):
            raise ValueError(f"quantization_config: the model has no linear layer or embedding {name!r}")
        replace(model, name, empty(old, form))
    tie(model)


def _formats_in(content: Mapping[str, Any]) -> Iterator[tuple[str, Format]]:
    modules = content.get("modules")
    if content.get("quant_method") != METHOD or not isinstance(modules, Mapping):
        raise ValueError(f"quantization_config must have quant_method {METHOD!r} and modules, but is {str(dict(content))[:200]}")
    for name, form in modules.items():
        yield name, Format.read(name, form)


def parameter_count(model: nn.Module) -> int:
    """Number of the weights of ``model``, quantised ones included."""
    codes = {id(m.codes): m.codes for m in model.modules() if isinstance(m, _Quantised)}.values()  # a tied matrix counts once
    return sum(p.numel() for p in model.parameters()) + sum(t.numel() * (2 if t.dtype == torch.uint8 else 1) for t in codes)
