"""Experts spread over processes (GShard, arXiv 2006.16668, section 3): each process keeps some of them, tokens travel to them and back.

    model = DistributedDataParallel(linattn.ffn.spread(model))     # under torchrun, after torch.distributed.init_process_group

Each process brings tokens of its own. What is not an expert is the same everywhere, and its gradients are averaged as ever;
those of the experts come from all processes with their tokens, and are divided by the number of processes, so that both are the
gradients of the mean of the processes' losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from linattn.ffn.mixture import Mixture


class Share:
    """This process's part of the experts of a mixture: an equal number on each process of ``group``, in order."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def elsewhere(self, rows: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """``rows`` [count, n, D] at the processes that have their experts, and back: [count, n, D].

        ``run`` is this process's experts on [count / size, n of all processes, D]. Every process must come here as often as the
        others; n may be different on each.
        """
        count, own, dim = rows.shape
        mine = count // self.size
        every = self._sizes(own, rows.device)
        there, here = [mine * own] * self.size, [mine * n for n in every]  # tokens that go to each process, and that come from it
        arrived = self._exchanged(rows.reshape(-1, dim), there, here)
        together = torch.cat([part.view(mine, n, dim) for part, n in zip(arrived.split(here), every, strict=True)], 1)
        done = torch.cat([part.reshape(-1, dim) for part in run(together).split(every, 1)])
        return self._exchanged(done, here, there).view(count, own, dim)

    def _sizes(self, own: int, device: torch.device) -> list[int]:
        every = torch.empty(self.size, dtype=torch.int64, device=device)
        dist.all_gather_into_tensor(every, torch.tensor([own], device=device), group=self.group)
        return every.tolist()

    def _exchanged(self, rows: Tensor, there: list[int], here: list[int]) -> Tensor:
        from torch.distributed.nn.functional import all_to_all_single  # not everywhere that torch is

        out = rows.new_empty(sum(here), rows.shape[1])
        return all_to_all_single(out, rows.contiguous(), here, there, group=self.group)


def spread(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Let each process of ``group`` (None: all) keep its share of the experts of every mixture in ``model``, and return ``model``.

    The model must be whole and the same on every process; it is changed in place, before optimizers and wrappers are made.
    ``DistributedDataParallel`` is told to leave the experts alone. :func:`gathered` makes a whole ``state_dict`` again.

    Raises:
        ValueError: where there are no mixtures, for one that is spread already, and for a number of experts that the number of
            processes does not divide.
    """
    share, ignored = Share(group), []
    found = _mixtures(model)
    if not found:
        raise ValueError("model must have a mixture of experts to spread, such as ffn='switch', but has none")
    for place, mixture in found:
        if mixture.share is not None:
            raise ValueError(f"{place or 'model'} is spread already")
        if mixture.count % share.size:
            raise ValueError(f"count must be a multiple of the {share.size} processes, but {place or 'model'} has {mixture.count} experts")
    for place, mixture in found:
        for name in mixture.stacked:
            own = getattr(mixture, name).detach().chunk(share.size)[share.rank].clone()
            parameter = nn.Parameter(own)
            parameter.register_hook(lambda gradient: gradient / share.size)
            setattr(mixture, name, parameter)
            ignored.append(f"{place}.{name}" if place else name)
        mixture.share = share
    model._ddp_params_and_buffers_to_ignore = ignored  # type: ignore[assignment]
    return model


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """The ``state_dict`` of the whole model that :func:`spread` made parts of; every process must call this, and gets it."""
    whole = dict(model.state_dict())
    for place, mixture in _mixtures(model):
        share = mixture.share
        if share is None:
            continue
        for name in mixture.stacked:
            key = f"{place}.{name}" if place else name
            own = whole[key].contiguous()
            parts = own.new_empty(share.size * own.shape[0], *own.shape[1:])
            dist.all_gather_into_tensor(parts, own, group=share.group)
            whole[key] = parts
    return whole


def _mixtures(model: nn.Module) -> list[tuple[str, Mixture]]:
    from linattn.ffn.mixture import Mixture

    return [(place, m) for place, m in model.named_modules() if isinstance(m, Mixture)]
