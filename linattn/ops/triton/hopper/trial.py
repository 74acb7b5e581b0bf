"""Trial of the installed triton: a tiny kernel with the features of those for Hopper, compiled and run."""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton import launch
from linattn.ops.triton.hopper import names, tma
from linattn.ops.triton.hopper.common import barriers, buffer, described, give_back
from linattn.ops.triton.hopper.operands import WIDE, exp2, in_blocks, keep, left
from linattn.ops.triton.probe import short

SIZE = 64


@gluon.jit
def bring(full, empty, source, tile, C: gl.constexpr):
    """Load two tiles through the buffer of one."""
    for i in gl.static_range(2):
        names.mbarrier.wait(empty.index(0), i & 1 ^ 1)
        names.mbarrier.expect(full.index(0), 2 * C * C)
        tma.load(source, [i * C, 0], full.index(0), tile.index(0))


@gluon.jit
def multiply(full, empty, tile, high, low, exponents, to, staged, C: gl.constexpr):
    """Sum the products with both tiles, split the sum in two bfloat16 numbers and add these."""
    total = gl.zeros([C, C], gl.float32, WIDE)
    weights = left(exp2(in_blocks(exponents, C, C).index(0).load(WIDE).to(gl.float32)))
    for i in gl.static_range(2):
        names.mbarrier.wait(full.index(0), i & 1)
        total = names.warpgroup_mma(weights, tile.index(0).permute((1, 0)), total, is_async=True)
        total = names.warpgroup_mma_wait(0, deps=[total])
        give_back(empty.index(0))
    keep(gl.convert_layout(total, gl.BlockedLayout([C * C // 512, 4], [2, 16], [4, 1], [1, 0])), (high.index(0), low.index(0)), 0, C)
    names.fence_async_shared()
    names.barrier()
    one = left(gl.where(gl.arange(0, C, gl.SliceLayout(1, WIDE))[:, None] == gl.arange(0, C, gl.SliceLayout(0, WIDE))[None, :], 1.0, 0.0))
    total = names.warpgroup_mma(one, low.index(0), gl.zeros([C, C], gl.float32, WIDE), use_acc=False, is_async=True)
    total = names.warpgroup_mma(one, high.index(0), total, is_async=True)
    staged.index(0).store(names.warpgroup_mma_wait(0, deps=[total]).to(gl.bfloat16))
    names.fence_async_shared()
    names.barrier()
    tma.store(to, [0, 0], staged.index(0))
    tma.store_wait(0)


@gluon.jit
def trial(x, weights, y, C: gl.constexpr):
    """y [C, C] = 2^weights (x0 + x1)ᵀ with x [2 C, C]."""
    source, to = described(x, 2 * C, C, C, C, C), described(y, C, C, C, C, C)
    tile, high, low, staged = buffer(1, C, C), buffer(1, C, C), buffer(1, C, C), buffer(1, C, C)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    exponents = gl.allocate_shared_memory(gl.bfloat16, [C, C], layout)
    lanes: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, C, gl.SliceLayout(1, lanes))[:, None]
    column = gl.arange(0, C, gl.SliceLayout(0, lanes))[None, :]
    names.copy_async(exponents, weights + row * C + column, mask=row < C)
    names.copy_commit()
    names.copy_wait(0)
    full, empty = barriers(1, 1), barriers(1, 1)
    names.fence_async_shared()
    names.barrier()
    gl.warp_specialize([
        (multiply, (full, empty, tile, high, low, exponents, to, staged, C)),
        (bring, (full, empty, source, tile, C)),
    ], [1], [24])  # fmt: skip


def refusal(device: torch.device) -> str | None:
    """Reason why the kernels cannot run on ``device``, or None. Compiles a kernel unless Triton has it cached, and synchronizes."""
    try:
        with launch.on_device(device):
            x, weights, wanted = _example(device)
            y = torch.zeros_like(weights)
            launch.set_allocator()
            trial[(1,)](x, weights, y, C=SIZE, num_warps=4, **launch.FUSED)
            right = torch.equal(y, wanted)
    except Exception as error:
        return f"a tiny one of them fails under triton {triton.__version__}: {short(error)}"
    return None if right else f"a tiny one of them gives a wrong result under triton {triton.__version__}"


def _example(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs and output, all exact in bfloat16."""
    i = torch.arange(SIZE, device=device)
    x = ((torch.arange(2 * SIZE, device=device)[:, None] + 3 * i) % 5 - 2).to(torch.bfloat16)
    chosen = (i[:, None] + i) % 16 == 0  # four in each row
    weights = torch.where(chosen, -(i[:, None] % 2).float(), -160.0).to(torch.bfloat16)  # 2^-160 is 0
    wanted = weights.float().exp2().where(chosen, 0) @ (x[:SIZE] + x[SIZE:]).float().T
    return x, weights, wanted.to(torch.bfloat16)
