"""Choice of the parameters that weight decay applies to, and Muon combined with AdamW in one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from linattn.mixers import Mixer

_NOT_DECAYED = ("bias", "norm", "scale")  # words in the names of two-dimensional parameters that are not matrices
BETAS = (0.9, 0.95)


def decayed(model: nn.Module) -> list[str]:
    """List the parameters with weight decay: matrices, convolutions and embeddings, but not norms, biases and time constants."""
    own = {f"{place}.{name}" for place, m in model.named_modules() if isinstance(m, Mixer) for name in m.keep_float32}
    return [name for name, p in model.named_parameters() if p.ndim >= 2 and name not in own and not _is_norm_or_bias(name)]


def _is_norm_or_bias(name: str) -> bool:
    """True if the name of the parameter, or of the module that owns it, says norm, bias or scale."""
    return any(word in part for part in name.split(".")[-2:] for word in _NOT_DECAYED)


def hidden_matrices(model: nn.Module) -> list[str]:
    """List the weights of linear layers between embedding and head, which Muon orthogonalises."""
    ends = {id(p) for m in (model.get_input_embeddings(), model.get_output_embeddings()) for p in m.parameters()}  # type: ignore[operator]
    linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)} - ends
    return [name for name, p in model.named_parameters() if id(p) in linear]


def groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Build AdamW's two parameter groups: with and without weight decay."""
    named, pulled = dict(model.named_parameters()), set(decayed(model))
    return [
        {"params": [p for n, p in named.items() if (n in pulled) is chosen], "weight_decay": weight_decay if chosen else 0.0}
        for chosen in (True, False)
    ]


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon for the hidden matrices of a model and AdamW for its other parameters, with one state and one list of groups.

    Muon's updates are scaled to the size of AdamW's (arXiv 2502.16982, section 2.2), so that one learning rate serves both.
    """

    def __init__(self, model: nn.Module, *, lr: float, weight_decay: float, fused: bool = False) -> None:
        matrices = set(hidden_matrices(model))
        muon = [p for name, p in model.named_parameters() if name in matrices]
        inside = {id(p) for p in muon}
        others = [{**g, "params": [p for p in g["params"] if id(p) not in inside]} for g in groups(model, weight_decay)]
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(muon, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW([g for g in others if g["params"]], lr=lr, betas=BETAS, fused=fused),
        ]
        super().__init__([g for part in self._parts for g in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Make both optimizers use this optimizer's groups and state."""
        first = len(self._parts[0].param_groups)
        self._parts[0].param_groups, self._parts[1].param_groups = self.param_groups[:first], self.param_groups[first:]
        for part in self._parts:
            part.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("closure must be None: both parts would call it")
        for part in self._parts:
            part.step()
        return None
