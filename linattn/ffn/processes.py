"""Experts spread over processes (GShard, arXiv 2006.16668, section 3): expert parallelism by all-to-all.

    model = DistributedDataParallel(linattn.ffn.spread(model))     # under torchrun, after torch.distributed.init_process_group

Each process has its own tokens. All other parameters are replicated, and their gradients are averaged as usual; those of the
experts are summed over the tokens of all processes and divided by the number of processes, so that both are gradients of the
mean of the processes' losses.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from linattn.ffn.mixture import Mixture
from linattn.ffn.share import Share


def spread(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Let each process of ``group`` (None: all) keep its share of the experts of every mixture in ``model``, and return ``model``.

    The model must be whole and the same on every process; it is changed in place, before optimizers and wrappers are made.
    ``DistributedDataParallel`` is set to ignore the experts. :func:`gathered` makes a whole ``state_dict`` again.

    Raises:
        ValueError: if there are no mixtures, if one is spread already, and if the number of processes does not divide the
            number of experts.
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
    """Gather the ``state_dict`` of the whole model that :func:`spread` divided; every process must call this, and gets it."""
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
    return [(place, m) for place, m in model.named_modules() if isinstance(m, Mixture)]
