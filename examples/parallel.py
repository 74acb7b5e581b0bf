"""Train a small language model on sequences that several processes share.

    torchrun --nproc-per-node 2 examples/parallel.py --steps 20

Each process holds a part of every sequence and of the parameters. Runs on GPUs where there are enough, else on the CPU.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import linattn
from linattn.parallel import Layout, context_parallel, next_tokens, parallelize, token_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=1024, help="of each sequence, in all processes together")
    parser.add_argument("--mixer", default="gated_deltanet*3, softmax")
    options = parser.parse_args()
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if torch.cuda.device_count() >= ranks else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("cp",))

    torch.manual_seed(0)  # every process makes the same model, then keeps its part
    model = linattn.LanguageModel(linattn.LMConfig(vocab_size=256, dim=64, layers=4, mixer=options.mixer)).to(device)
    parallelize(model, mesh, checkpoint=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.tensor(list(b"What fades, what is erased, what is written, what is read. " * 100), device=device)
    layout = Layout.of(mesh, options.tokens, order="zigzag")
    for step in range(options.steps):
        start = 7 * step % (len(text) - options.tokens)
        ids = text[None, start : start + options.tokens]  # the whole sequence, alike in every process
        with context_parallel(layout):
            loss = token_loss(model(layout.shard(ids, 1)), next_tokens(ids, layout), layout)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.4f}", flush=True)
    dist.barrier()  # a process that ends while gloo's threads still hold tensors of the last exchange is aborted
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
