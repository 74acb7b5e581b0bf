"""Linear maps of one vector that follow one another, in one launch: on Hopper the way from one to the next is that of a few words.

One program stays on each multiprocessor. It brings its rows of all matrices, in the order in which they are wanted, into a ring of
tiles in shared memory, which nothing but room holds up: the memory is busy while vectors are on their way. Those go from program to
program in words of a number and the count of the launch. Who wants one asks for it until the count is right; there are no barriers
between programs. So all programs have to run at the same time, and no two of these launches may share a device.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment,var-annotated"
from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from linattn.ops.linears import Link
from linattn.ops.triton import launch
from linattn.ops.triton.linears import _silu, _steps, _store
from linattn.ops.triton.linears import refusal as refused

BN, BK, WARPS = 8, 1024, 8  # rows and channels of a tile
PARTS = 16  # of a row: one vector for tensor cores is as many
SLOTS = 6  # tiles that are on their way: two launches fit into a multiprocessor, so that one brings its first ones while another ends
WORD = 4  # words that are asked for at once
LARGEST = 16384  # channels of a vector

# Of a link: the sizes of its results, its channels, whether two of them are gated, tiles of a program, the place of program 0 among
# its blocks, neighbours that are normed, weights of the norm, eps, which results have a bias, steps behind them, where its words begin,
# and whose result is added (-1: none or one from outside).
SIZES, CHANNELS, GATED, TILES, SHIFT, NORMED, WEIGHTS, EPS, BIASED, FINISH, OFFSET, RESIDUAL = map(gl.constexpr, range(12))


@gluon.constexpr_function
def _of(links, s, what):
    return links[s][what]


@gluon.constexpr_function
def _at(numbers, i):
    return numbers[i]


@gluon.constexpr_function
def _padded(rows, i, size):
    return -(-rows[i] // size) * size


@gluon.constexpr_function
def _count(numbers):
    return len(numbers)


@gluon.jit
def _number(word, dtype: gl.constexpr):
    return (word >> 16).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)


@gluon.jit
def _put(words, n, there, y, count, dtype: gl.constexpr):
    word = (y.to(dtype).to(gl.int16, bitcast=True).to(gl.int32) << 16) | count
    gl.inline_asm_elementwise(
        "{ .reg .pred q; setp.ne.u32 q, $3, 0; @q st.relaxed.gpu.global.b32 [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r,r", [words + n, word, there.to(gl.int32)], gl.int32, False, 1,
    )  # fmt: skip


@gluon.jit
def _ask(words, k):
    """Words as they are by now, four of a thread at a time."""
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.v4.b32 {$0, $1, $2, $3}, [$4]; // $5 $6 $7", "=r,=r,=r,=r,l,l,l,l", [words + k], gl.int32, False, 4
    )


@gluon.jit
def _settled(words, k, word, count):
    """The words that were asked for, asked for again until they are those of this launch."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred fresh;
        .reg .b32 a, b;
        mov.b32 $0, $8;
        mov.b32 $1, $9;
        mov.b32 $2, $10;
        mov.b32 $3, $11;
        again:
        xor.b32 a, $0, $12;
        xor.b32 b, $1, $12;
        or.b32 a, a, b;
        xor.b32 b, $2, $12;
        or.b32 a, a, b;
        xor.b32 b, $3, $12;
        or.b32 a, a, b;
        and.b32 a, a, 65535;
        setp.eq.u32 fresh, a, 0;
        @fresh bra there;
        ld.relaxed.gpu.global.v4.b32 {$0, $1, $2, $3}, [$4];
        bra again;
        there:
        }""",
        "=&r,=&r,=&r,=&r,l,l,l,l,r,r,r,r,r,r,r,r", [words + k, word, count], gl.int32, False, 4,
    )  # fmt: skip


@gluon.jit
def _own(matrices, block, ROWS: gl.constexpr, BN: gl.constexpr):
    """Which matrix the block is of, its address and rows, the rows of those before it, and the block's first row."""
    index = block * 0
    matrix = matrices[0]
    N = index + _at(ROWS, 0)
    before = index
    first = block * BN
    for i in gl.static_range(1, _count(ROWS)):
        here = (index == i - 1) & (first >= _padded(ROWS, i - 1, BN))
        index = gl.where(here, i, index)
        matrix = gl.where(here, matrices[i], matrix)
        N = gl.where(here, _at(ROWS, i), N)
        before = gl.where(here, before + _at(ROWS, i - 1), before)
        first = gl.where(here, first - _padded(ROWS, i - 1, BN), first)
    return index, matrix, N, before, first


@gluon.jit
def _bias(biases, index, n, in_n, ANY: gl.constexpr):
    out = n.to(gl.float32) * 0.0
    for i in gl.static_range(_count(ANY)):
        if _at(ANY, i):
            out += gl.load(biases[i] + n, mask=in_n & (index == i), other=0.0).to(gl.float32)
    return out


@gluon.jit
def _bring(tile, program, slot, matrices, LINKS: gl.constexpr, s: gl.constexpr, G: gl.constexpr, PARTS: gl.constexpr):
    """Have a tile of one link brought into ``slot``, a part of a row behind the other."""
    K: gl.constexpr = _of(LINKS, s, CHANNELS)
    ROWS: gl.constexpr = _of(LINKS, s, SIZES)
    BN: gl.constexpr = slot.shape[0] // PARTS
    EACH: gl.constexpr = slot.shape[1]
    CHUNKS: gl.constexpr = (K + EACH * PARTS - 1) // (EACH * PARTS)
    ROUND: gl.constexpr = CHUNKS * 2 if _of(LINKS, s, GATED) else CHUNKS
    LANES: gl.constexpr = min(EACH // 8, 32)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    _index, matrix, N, _before, row = _own(matrices, (program + _of(LINKS, s, SHIFT)) % G + tile // ROUND * G, ROWS, BN)
    if _of(LINKS, s, GATED):
        matrix = gl.where(tile // CHUNKS % 2 == 0, matrix, matrices[1])
    part = gl.arange(0, BN * PARTS, gl.SliceLayout(1, L))
    n = (row + part // PARTS)[:, None]
    k = (tile % CHUNKS * (EACH * PARTS) + part % PARTS * EACH)[:, None] + gl.arange(0, EACH, gl.SliceLayout(0, L))[None, :]
    async_copy.async_copy_global_to_shared(slot, matrix + n.to(gl.int64) * K + k, mask=(n < N) & (k < K))


@gluon.jit
def _issue(j, program, ring, matrices, LINKS: gl.constexpr, G: gl.constexpr, PARTS: gl.constexpr):
    """Have the ``j``-th tile of this program, of whichever link, brought into its place of the ring."""
    slot = ring.index(j % ring.shape[0])
    first = 0
    for s in gl.static_range(_count(LINKS)):
        if (j >= first) & (j < first + _of(LINKS, s, TILES)):
            _bring(j - first, program, slot, matrices[s], LINKS, s, G, PARTS)
        first += _of(LINKS, s, TILES)
    async_copy.commit_group()


@gluon.jit
def _prepare(x, words, norm, gate, vector, count, LINKS: gl.constexpr, s: gl.constexpr):
    """Leave a link's vector, normed and gated, in shared memory."""
    dtype: gl.constexpr = vector.dtype
    K: gl.constexpr = _of(LINKS, s, CHANNELS)
    SIZE: gl.constexpr = _of(LINKS, s, NORMED)
    PARTS: gl.constexpr = vector.shape[1]
    BK: gl.constexpr = PARTS * vector.shape[2]
    CHUNKS: gl.constexpr = (K + BK - 1) // BK
    P: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    asked = ()
    weights = ()
    gates = ()
    for c in gl.static_range(CHUNKS):  # everything is on its way before the first number is used
        k = c * BK + gl.arange(0, BK, P)
        if (c + 1) * BK > K:
            k = gl.minimum(k, K - 4 + k % 4)
        if norm is not None:
            weights = weights + (gl.load(norm + k % _of(LINKS, s, WEIGHTS)),)
        if gate is not None:
            gates = gates + (gl.load(gate + k),)
        asked = asked + ((gl.load(x + k) if s == 0 else _ask(words, k)),)
    squares = gl.zeros([BK], gl.float32, P)
    numbers = ()
    for c in gl.static_range(CHUNKS):
        k = c * BK + gl.arange(0, BK, P)
        if (c + 1) * BK > K:
            k = gl.minimum(k, K - 4 + k % 4)
        if s == 0:
            a = asked[c].to(gl.float32)
        else:
            a = _number(_settled(words, k, asked[c], count), dtype)
        if (c + 1) * BK > K:
            a = gl.where(c * BK + gl.arange(0, BK, P) < K, a, 0.0)
        if SIZE == K:
            squares += a * a
        elif SIZE > 0:
            heads = a.reshape([BK // SIZE, SIZE])
            heads = heads / gl.sqrt_rn(gl.sum(heads * heads, 1) / SIZE + _of(LINKS, s, EPS))[:, None]
            a = gl.convert_layout(heads.reshape([BK]), P)
        numbers = numbers + (a,)
    factor = 1.0
    if SIZE == K:
        factor = 1.0 / gl.sqrt_rn(gl.sum(squares, 0) / K + _of(LINKS, s, EPS))
    for c in gl.static_range(CHUNKS):
        a = numbers[c] * factor
        if norm is not None:
            a *= weights[c].to(gl.float32)
        if gate is not None:
            a *= _silu(gates[c].to(gl.float32))
        if (c + 1) * BK > K:  # heads of nothing have no length, and eps may be 0
            a = gl.where(c * BK + gl.arange(0, BK, P) < K, a, 0.0)
        vector.index(c).store(a.to(dtype).reshape([PARTS, BK // PARTS]))


@gluon.jit
def _link(
    j, program, count, ring, vector, matrices, biases, constants, residual, words, y, wide,
    LINKS: gl.constexpr, s: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """The products of one link with this program's rows, while tiles of those behind it are brought; the number of the next tile.

    Tensor cores multiply every part of a row with every part of the vector. What is wanted of that is the sum of its diagonal.
    """
    K: gl.constexpr = _of(LINKS, s, CHANNELS)
    ROWS: gl.constexpr = _of(LINKS, s, SIZES)
    ANY: gl.constexpr = _of(LINKS, s, BIASED)
    STEPS: gl.constexpr = _of(LINKS, s, FINISH)
    ADDED: gl.constexpr = _of(LINKS, s, RESIDUAL)
    EACH: gl.constexpr = 2 if _of(LINKS, s, GATED) else 1
    PARTS: gl.constexpr = vector.shape[1]
    BK: gl.constexpr = PARTS * vector.shape[2]
    BN: gl.constexpr = ring.shape[1] // PARTS
    CHUNKS: gl.constexpr = (K + BK - 1) // BK
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    OUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    dtype: gl.constexpr = ring.dtype
    same = gl.arange(0, BN * PARTS, gl.SliceLayout(1, MMA))[:, None] % PARTS == gl.arange(0, PARTS, gl.SliceLayout(0, MMA))[None, :]
    held = ()
    if CHUNKS <= 4:  # registers have room for the vector
        for c in gl.static_range(CHUNKS):
            held = held + (vector.index(c).permute((1, 0)).load(RIGHT),)
    for r in range(_of(LINKS, s, TILES) // (EACH * CHUNKS)):
        index, _matrix, N, before, row = _own(matrices[s], (program + _of(LINKS, s, SHIFT)) % G + r * G, ROWS, BN)
        n = row + gl.arange(0, BN, OUT)
        in_n = n < N
        if residual is not None:
            other = gl.load(residual + n, mask=in_n, other=0.0).to(gl.float32)
        elif ADDED >= 0:  # this program has had all of that vector
            other = _number(gl.load(words + _of(LINKS, ADDED, OFFSET) + n, mask=in_n, other=0, volatile=True), dtype)
        out = _bias(biases[s], index, n, in_n, ANY)
        for m in gl.static_range(EACH):
            sums = gl.zeros([BN * PARTS, PARTS], gl.float32, MMA)
            for c in gl.static_range(CHUNKS):
                async_copy.wait_group(ring.shape[0] - 1)
                tile = ring.index(j % ring.shape[0]).load(LEFT)
                if CHUNKS <= 4:
                    sums = mma_v2(tile, held[c], sums)
                else:
                    sums = mma_v2(tile, vector.index(c).permute((1, 0)).load(RIGHT), sums)
                _issue(j + ring.shape[0], program, ring, matrices, LINKS, G, PARTS)
                j += 1
            sums = gl.where(same, sums, 0.0).reshape([BN, PARTS * PARTS])
            product = gl.convert_layout(gl.sum(sums, 1), OUT)
            if m == 0:
                out += product
            else:
                out = _silu(out) * (product + _bias(biases[s], 1, n, in_n, ANY))
        if residual is not None or ADDED >= 0:
            out += other
        if s + 1 < _count(LINKS):
            _put(words + _of(LINKS, s, OFFSET), n, in_n, out, count, dtype)
        _store(y, wide, before + n, in_n, out, constants[s], index, n, in_n, STEPS)
    return j


@gluon.jit
def chain_kernel(
    x, gate, residuals, words, matrices, biases, constants, norms, ys, wides,
    LINKS: gl.constexpr, G: gl.constexpr, MOST: gl.constexpr, SLOTS: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """Of the first link the vector is ``x``, whose norm ``gate`` is behind; of others the first result of the link before."""
    tl.extra.cuda.gdc_launch_dependents()
    dtype: gl.constexpr = x.dtype.element_ty
    program = gl.program_id(0)
    near: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])  # no two of eight parts in the same banks
    ring = gl.allocate_shared_memory(dtype, [SLOTS, BN * PARTS, BK // PARTS], near)
    vector = gl.allocate_shared_memory(dtype, [MOST, PARTS, BK // PARTS], near)
    for j in range(SLOTS):
        _issue(j, program, ring, matrices, LINKS, G, PARTS)
    tl.extra.cuda.gdc_wait()
    count = (gl.load(words + program) + 1) & 65535
    # Of a zero that the compiler knows it would find out which tiles there are not, and its analyses fail on code that is dead.
    j = gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], gl.int32, False, 1)
    for s in gl.static_range(_count(LINKS)):
        asked = words if s == 0 else words + _of(LINKS, s - 1, OFFSET)
        _prepare(x, asked, norms[s], gate if s == 0 else None, vector, count, LINKS, s)
        j = _link(j, program, count, ring, vector, matrices, biases, constants, residuals[s], words, ys[s], wides[s], LINKS, s, G)
    async_copy.wait_group(0)
    gl.store(words + program, count)


def refusal(x: Tensor, links: Sequence[Link]) -> str | None:
    """Why the kernel does not run this; None: it does."""
    if not x.is_cuda or launch.capability(x.device) < (9, 0):
        return "it is for Hopper and what came after it"
    if x.dtype not in (torch.float16, torch.bfloat16) or x.numel() != x.shape[-1]:
        return f"it takes one vector of 16-bit numbers, but x is {x.dtype} of shape {list(x.shape)}"
    channels = x.shape[-1]
    for i, (weights, _, options) in enumerate(links):
        K, size, residual = weights[0].shape[1], options.get("size", 0), options.get("residual")
        if (reason := refused(x, weights)) is not None:
            return reason
        if channels != K or K % 8 or K > LARGEST or any(not w.is_contiguous() or w.data_ptr() % 16 for w in weights):
            return f"the weights of link {i} must be whole and aligned, [N, {channels}] with a multiple of 8 channels"
        if size not in (0, K) and (size & (size - 1) or size > BK or K % size):
            return f"link {i} norms {size} neighbours, which is no power of two"
        if (i and options.get("gate") is not None) or (options.get("gated") and len(weights) != 2):
            return f"the gate of link {i} is not known to it"
        if len(weights) > 1 and not options.get("gated") and (residual is not None or i + 1 < len(links)):
            return f"link {i} has several results"
        channels = weights[0].shape[0]
    return None


def room(links: Sequence[Link], device: torch.device) -> int:
    """Words of 32 bits that a chain keeps from one launch to the next."""
    return _aligned(_multiprocessors(device)) + sum(_aligned(weights[0].shape[0]) for weights, _, _ in links)


def chained(x: Tensor, links: Sequence[Link], kept: Tensor) -> list[list[Tensor]]:
    """As :func:`linattn.ops.linears.chained`; summed in float32 and rounded once."""
    G = _multiprocessors(x.device)
    described, ys, wides, all_constants, results = [], [], [], [], []
    shift, offset = 0, _aligned(G)  # the counts come first
    for weights, own, options in links:
        gated, finish, residual = bool(options.get("gated")), options.get("finish", ()), options.get("residual")
        sizes, K = tuple(w.shape[0] for w in weights[: 1 if gated else None]), weights[0].shape[1]
        norm, (steps, constants) = options.get("norm"), _steps(finish)
        blocks = sum(triton.cdiv(n, BN) for n in sizes)
        tiles = triton.cdiv(blocks, G) * triton.cdiv(K, BK) * (2 if gated else 1)
        described.append((
            sizes, K, gated, tiles, shift, options.get("size", 0), 0 if norm is None else norm.numel(), options.get("eps", 0.0),
            tuple(b is not None for b in own), steps, offset, residual if isinstance(residual, int) else -1,
        ))  # fmt: skip
        shift, offset = (shift - blocks) % G, offset + _aligned(weights[0].shape[0])  # whoever has had a block less comes first
        y = torch.empty(sum(sizes), dtype=x.dtype, device=x.device)
        wide = torch.empty(y.shape, dtype=torch.float32, device=x.device) if steps else y
        pieces = [(wide if i < len(finish) and finish[i] else y).split(sizes)[i] for i in range(len(sizes))]
        results.append([piece.view(*x.shape[:-1], -1) for piece in pieces])
        ys.append(y)
        wides.append(wide)
        all_constants.append(constants or (x,))
    outside = tuple(o if isinstance(o := options.get("residual"), Tensor) else None for _, _, options in links)
    matrices = tuple(tuple(weights) for weights, _, _ in links)
    biases = tuple(tuple(w if b is None else b.contiguous() for w, b in zip(weights, own, strict=True)) for weights, own, _ in links)
    norms = tuple(None if (norm := options.get("norm")) is None else norm.contiguous() for _, _, options in links)
    gate = links[0][2].get("gate")
    with launch.on_device(x.device):
        chain_kernel[(G,)](
            x.contiguous(), None if gate is None else gate.contiguous(), tuple(None if o is None else o.contiguous() for o in outside),
            kept, matrices, biases, tuple(all_constants), norms, tuple(ys), tuple(wides),
            LINKS=tuple(described), G=G, MOST=triton.cdiv(max(link[1] for link in described), BK), SLOTS=SLOTS, BN=BN, BK=BK,
            PARTS=PARTS, num_warps=WARPS, launch_pdl=True,
        )  # fmt: skip
    return results


def _aligned(words: int) -> int:
    return triton.cdiv(words, WORD) * WORD


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
