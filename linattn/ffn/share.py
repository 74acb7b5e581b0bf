"""One process's part of a mixture's experts, and the exchange of tokens with the others."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


class Share:
    """Part of a mixture's experts on this process: an equal number on each process of ``group``, in order."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def elsewhere(self, rows: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Send ``rows`` [count, n, D] to the processes of their experts and back: [count, n, D].

        ``run`` is this process's experts on [count / size, n of all processes, D]. Every process must make equally many calls;
        n may differ between them.
        """
        count, own, dim = rows.shape
        mine = count // self.size
        every = self._sizes(own, rows.device)
        there, here = [mine * own] * self.size, [mine * n for n in every]  # tokens sent to and received from each process
        arrived = self._exchanged(rows.reshape(-1, dim), there, here)
        together = torch.cat([part.view(mine, n, dim) for part, n in zip(arrived.split(here), every, strict=True)], 1)
        done = torch.cat([part.reshape(-1, dim) for part in run(together).split(every, 1)])
        return self._exchanged(done, here, there).view(count, own, dim)

    def _sizes(self, own: int, device: torch.device) -> list[int]:
        every = torch.empty(self.size, dtype=torch.int64, device=device)
        dist.all_gather_into_tensor(every, torch.tensor([own], device=device), group=self.group)
        return every.tolist()

    def _exchanged(self, rows: Tensor, there: list[int], here: list[int]) -> Tensor:
        from torch.distributed.nn.functional import all_to_all_single  # not in every build of torch

        out = rows.new_empty(sum(here), rows.shape[1])
        return all_to_all_single(out, rows.contiguous(), here, there, group=self.group)
