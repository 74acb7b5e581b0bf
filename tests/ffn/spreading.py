"""One of two processes with half of the experts each; both compare with a whole model on both batches.

    python -m tests.ffn.spreading RANK RENDEZVOUS_FILE ANSWER_FILE

Run by test_spread.py. Process 0 writes the results, {"NAME": largest error or message}, as JSON.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from linattn import LanguageModel, LMConfig, ffn

WORLD = 2
CASES = {
    "switch": {}, "gshard": {"capacity": 1.0}, "st_moe": {"capacity": 0.6}, "experts": {"count": 6, "active": 3},
    "gshard without capacity": {"capacity": None},
}  # fmt: skip


def main(rank: int, rendezvous: str, answer: str) -> None:
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # the machine's own name need not resolve
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD, timeout=timedelta(minutes=1))
    found: dict[str, float | str] = {case: error(case.split()[0], options, rank) for case, options in CASES.items()}
    found["unequal"], found["evaluated"] = unequal(rank), evaluated(rank)
    found["refused"] = refused()
    every: list[dict] = [{}] * WORLD
    dist.all_gather_object(every, found)
    if rank == 0:
        worst = {case: max((f[case] for f in every), key=str) if case == "refused" else max(f[case] for f in every) for case in found}
        Path(answer).write_text(json.dumps(worst), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def stack(name: str, options: dict) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LMConfig(vocab_size=11, dim=32, layers=2, mixer="gla", ffn=name, ffn_options={name: options})).double()


def step(model: nn.Module, x: Tensor) -> Tensor:
    """A step of gradient descent on a loss with the auxiliary losses; returns the loss."""
    with ffn.reports() as told:
        y = model(x)
    loss = y.square().mean() + ffn.added_loss(told)
    model.zero_grad()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return loss.detach()


def error(name: str, options: dict, rank: int) -> float:
    """Of losses and of weights after two steps, those of the other process's experts included."""
    whole = stack(name, options)
    mine = ffn.spread(copy.deepcopy(whole))
    assert mine.model.layers[0].ffn.up_proj.shape[0] == mine.model.layers[0].ffn.count // WORLD
    spread, worst = DistributedDataParallel(mine), 0.0
    for seed in range(2):
        x = torch.randint(11, (2 * WORLD, 12), generator=torch.Generator().manual_seed(seed))
        loss = step(spread, x[2 * rank : 2 * rank + 2])
        dist.all_reduce(loss)
        worst = max(worst, abs(loss.item() / WORLD - step(whole, x).item()))
        again = ffn.gathered(mine)
        worst = max(worst, *((again[key] - wanted).abs().max().item() for key, wanted in whole.state_dict().items()))
    return worst


def unequal(rank: int) -> float:
    """Rows of different lengths on each process: outputs equal a whole layer's."""
    torch.manual_seed(0)
    whole = ffn.create("switch", 16, 24, capacity=0.7).double()
    mine = ffn.spread(copy.deepcopy(whole))
    rows = [torch.randn(3, 7, 16, dtype=torch.float64), torch.randn(1, 20, 16, dtype=torch.float64)]
    return (mine(rows[rank]) - whole(rows[rank])).abs().max().item()


def evaluated(rank: int) -> float:
    """In evaluation, without a capacity."""
    whole = stack("st_moe", {}).eval()
    mine = ffn.spread(copy.deepcopy(whole))
    x = torch.randint(11, (1 + rank, 5), generator=torch.Generator().manual_seed(rank))
    with torch.no_grad():
        return (mine(x) - whole(x)).abs().max().item()


def refused() -> str:
    """Errors for a number of experts that two processes cannot share, for a spread model, and for one without mixtures."""
    said = []
    for model in (ffn.create("switch", 16, count=3), ffn.spread(ffn.create("switch", 16)), ffn.create("swiglu", 16)):
        try:
            ffn.spread(model)
        except ValueError as problem:
            said.append(str(problem))
    return " | ".join(said)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
