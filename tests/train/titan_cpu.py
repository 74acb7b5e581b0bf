"""torchtitan's training on CPUs: ``torchrun -m tests.train.titan_cpu ...``, for which torchtitan itself has no support.

torchtitan assumes CUDA without an accelerator, and 0.3.0 calls ``torch.distributed.set_timeout``, which torch 2.13 lacks.
"""

import os
from types import SimpleNamespace

import torch
import torch.distributed as dist


def main() -> None:
    torch._utils._get_available_device_type = lambda: "cpu"
    stand_in = {
        "get_device_name": lambda device=None: "cpu", "get_device_properties": lambda device=None: SimpleNamespace(total_memory=1 << 34),
        "reset_peak_memory_stats": lambda device=None: None, "empty_cache": lambda: None, "memory_stats": lambda device=None: {},
        "manual_seed_all": lambda seed: None,
    }  # fmt: skip
    for name, value in stand_in.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, value)
    barrier = dist.barrier
    dist.barrier = lambda *args, device_ids=None, **kwargs: barrier(*args, **kwargs)  # noqa: PLW0108  the device's name is no number
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda *args, **kwargs: None
    from torchtitan.train import main as run

    run()


def hybrid():
    """Configuration of a small model on the folder ``TITAN_DATA``."""
    from linattn.train.titan import trainer_config

    return trainer_config(os.environ["TITAN_DATA"], mixer="gated_deltanet, softmax", dim=64, layers=2)


if __name__ == "__main__":
    main()
