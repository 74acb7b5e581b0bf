"""Patterns: every implementation matches the mask, with gradients, and time and memory follow the pattern instead of n²."""

from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from linattn.ops import flex, pattern
from linattn.ops.pattern import GridBlocks, attend, blocks, causal, global_tokens, local, strided, summaries
from tests.conformance.checks.calls import Written

PATTERNS = {
    "causal": causal(),
    "local": local(3, 2),
    "dilated": local(2, 1, 3),
    "strided": strided(4),
    "summaries": summaries(4, 2),
    "fixed": (blocks(4) | summaries(4)) & causal(),
    "blocks": blocks(5, before=2, after=1),
    "other blocks": blocks(4, shift=2),
    "global": global_tokens(3),
    "longformer": local(2, 2) | global_tokens(2),
    "sparse": (local(3) | strided(4)) & causal(),
    "grid": GridBlocks(5, 2, 2, 1, 1, 1),
    "decoder grid": GridBlocks(5, 2, 3, 1, 0, 1) & causal(),
    "three": local(1, 1) | strided(5) | global_tokens(1),
}
LONG = {  # as the layers use them
    "causal": causal(),
    "local": local(127),
    "dilated": local(64, 64, 4),
    "blocks": blocks(128, before=128),
    "other blocks": blocks(128, shift=1),
    "longformer": local(64, 64) | global_tokens(2),
    "sparse": (local(127) | strided(128)) & causal(),
    "grid": GridBlocks(128, 8, 8, 4, 4, 4),
}


def tensors(length, dtype=torch.float64, size=4, heads=2):
    return [torch.randn(2, length, heads, size, dtype=dtype, requires_grad=True) for _ in range(3)]


def by_rows(q, k, v, found, lengths):
    """Row by row and over all pairs; padding is 0."""
    rows = []
    for row, length in enumerate(lengths):
        mask = found.mask(length)
        scores = torch.einsum("thk,shk->hts", q[row, :length], k[row, :length]) * q.shape[3] ** -0.5
        weights = torch.where(mask, scores.masked_fill(~mask, -1e30).softmax(-1), 0.0)
        o = torch.einsum("hts,shv->thv", weights, v[row, :length])
        rows.append(torch.cat([o, o.new_zeros(q.shape[1] - length, *o.shape[1:])]))
    return torch.stack(rows)


@pytest.mark.parametrize("backend", ["tiles", "dense"])
@pytest.mark.parametrize("name", PATTERNS)
def test_definition(name, backend):
    """Outputs and gradients, with and without padding."""
    for length in (0, 1, 7, 25, 70):
        q, k, v = tensors(length)
        lengths = [length, length // 2]
        real = torch.arange(length) < torch.tensor(lengths)[:, None]
        runs = []
        for o in (
            attend(q, k, v, PATTERNS[name], lengths=torch.tensor(lengths), backend=backend),
            by_rows(q, k, v, PATTERNS[name], lengths),
        ):
            o = torch.where(real[..., None, None], o, 0.0)
            weight = torch.linspace(-1, 1, max(o.numel(), 1), dtype=o.dtype)[: o.numel()].view_as(o)
            runs.append([o, *torch.autograd.grad((o * weight).sum(), (q, k, v), materialize_grads=True)])
        for ours, theirs in zip(*runs, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", PATTERNS)
def test_parts_hold_each_pair_once(name):
    """And no query is in two tiles of a part."""
    for length in (1, 7, 40):
        seen = torch.zeros(length, length, dtype=torch.int64)
        for part in PATTERNS[name].parts(length):
            queries = part.queries[part.queries >= 0]
            assert queries.unique().numel() == queries.numel()
            pair = part.seen(length)
            rows, columns = (t.expand(pair.shape)[pair] for t in (part.queries[:, :, None], part.keys[:, None]))
            seen.index_put_((rows, columns), torch.ones_like(rows), accumulate=True)
        assert torch.equal(seen, PATTERNS[name].mask(length).long())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", PATTERNS)
def test_flex(name):
    """The blocks of flex_attention's mask contain every pair; on a CPU it has no gradients."""
    with torch.no_grad():
        q, k, v = tensors(260, torch.float32, 16)
        lengths = torch.tensor([260, 140])
        ours, theirs = (attend(q, k, v, PATTERNS[name], lengths=lengths, backend=backend) for backend in ("flex", "dense"))
    real = torch.arange(260) < lengths[:, None]
    torch.testing.assert_close(ours[real], theirs[real], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LONG)
def test_flex_on_a_gpu(name):
    """The kernel, gradients too, in bfloat16 against tiles in float64."""
    q, k, v = (t.detach().cuda().bfloat16().requires_grad_() for t in tensors(1024, torch.float32, 64, 4))
    lengths = torch.tensor([1024, 700]).cuda()
    real = (torch.arange(1024).cuda() < lengths[:, None])[..., None, None]
    runs = []
    for given, backend in (((q, k, v), "flex"), ([t.detach().double().requires_grad_() for t in (q, k, v)], "tiles")):
        o = torch.where(real, attend(*given, LONG[name], lengths=lengths, backend=backend), 0.0)
        weight = torch.linspace(-1, 1, o.numel(), device="cuda").view_as(o).to(o.dtype)
        runs.append([o, *torch.autograd.grad((o * weight).sum(), given)])
    for ours, theirs in zip(*runs, strict=True):
        assert (ours.double() - theirs).norm() <= 0.015 * theirs.norm()


@pytest.mark.parametrize("name", [name for name in LONG if name != "causal"])
def test_work_and_memory_follow_the_pattern(name):
    """Operations and written bytes are proportional to the pairs of the tiles, a small share of all pairs."""
    length, found = 4096, LONG[name]
    q, k, v = (torch.randn(1, length, 1, 16) for _ in range(3))
    with torch.no_grad(), FlopCounterMode(display=False) as counter, Written() as written:
        attend(q, k, v, found)
    pairs = found.pairs(length)
    assert pairs < length * length / 6
    assert counter.get_total_flops() <= 4 * 16 * pairs or len(found.parts(length)) == 1  # the fused kernel is not counted
    assert written.bytes < 60 * pairs + 2000 * length
    seen = sum(part.seen(length).sum().item() for part in found.parts(length))
    assert seen <= pairs <= 8 * seen


def test_flex_is_compiled_for_any_number_of_patterns(monkeypatch):
    """Otherwise torch warns, which is an error here."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(flex, "_run", lambda _, part: flex.compiled(type(part.within), *map(type, part.without)))
    flex.compiled.cache_clear()
    torch.compiler.reset()
    for found in LONG.values():
        q, k, v = (torch.randn(2, 1024, 2, 16) for _ in range(3))
        torch.testing.assert_close(flex.attend(q, k, v, found, None, 0.25), attend(q, k, v, found, scale=0.25, backend="tiles"))
    flex.compiled.cache_clear()


def test_flex_skips_blocks():
    """Visited blocks of 128: a band of three, or the gathered columns."""
    for name, share in (("local", 3 / 32), ("sparse", 4 / 32), ("blocks", 3 / 32), ("longformer", 5 / 32)):
        told = 0
        for part in LONG[name].parts(4096):
            rows, columns = (flex._order(places, 4096) for places in (part.queries, part.keys))
            told += flex.block_mask(part, rows, columns, None).kv_num_blocks.sum().item()
        assert told <= share * 32 * 32, (name, told)


@pytest.mark.parametrize("name", ["local", "sparse", "longformer", "other blocks"])
def test_compile(name):
    q, k, v = tensors(40)
    call = torch.compile(lambda q, k, v: attend(q, k, v, PATTERNS[name]), fullgraph=True, backend="eager")
    torch.testing.assert_close(call(q, k, v), attend(q, k, v, PATTERNS[name]))


@pytest.mark.parametrize("name", [pytest.param("decoder grid", marks=pytest.mark.slow), "fixed", "sparse"])
def test_compile_at_lengths_that_change(name):
    torch._dynamo.reset()
    call = torch.compile(lambda q, k, v: attend(q, k, v, PATTERNS[name]), fullgraph=True, backend="eager")
    for tokens in (40, 41, 50):
        q, k, v = tensors(tokens)
        torch.testing.assert_close(call(q, k, v), attend(q, k, v, PATTERNS[name]))
    torch._dynamo.reset()


def test_reach():
    assert [p.reach for p in (local(3), local(2, 9, 3), blocks(5, before=2), strided(4), causal())] == [3, 6, 6, None, None]
    assert (local(3) | blocks(5)).reach == 4 and (local(3) | strided(2)).reach is None and (local(3) & strided(2)).reach == 3


def test_refusals():
    q = torch.zeros(1, 4, 2, 8)
    for call, message in (
        (lambda: attend(q, q[:, :3], q, causal()), r"q, k and v must be \[B, T, H, K\]"),
        (lambda: attend(q, q, q, causal(), backend="fast"), "backend must be one of 'auto', 'tiles', 'flex', 'dense', but came as 'fast'"),
        (lambda: attend(q, q.double(), q, causal()), "k must be torch.float32, but came as torch.float64"),
        (lambda: attend(q.long(), q.long(), q.long(), causal()), "q must be torch.float64 or .*, but came as torch.int64"),
        (lambda: attend(q, q, q, causal(), lengths=torch.tensor([1, 2])), r"lengths must have shape \[B\] = \[1\], but came with \[2\]"),
        (lambda: attend(q, q, q, causal(), lengths=torch.tensor([5])), "lengths must be from 0 to T = 4"),
        (lambda: attend(q, q, q, causal(), lengths=torch.tensor([2.0])), "lengths must be torch.int64 or torch.int32"),
        (lambda: attend(q, q, q, causal(), scale="1"), "scale must be a number"),
        (lambda: local(-1), "before must be an integer of at least 0, but came as -1"),
        (lambda: strided(0), "stride must be an integer of at least 1, but came as 0"),
        (lambda: summaries(4, 5), "last must be an integer from 1 to 4, but came as 5"),
        (lambda: blocks(4, shift=1, before=2), "shift must be 0 with before or after"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="pattern must be a Pattern"):
        attend(q, q, q, None)
    with pytest.raises(TypeError, match="v must be a tensor"):
        attend(q, q, None, causal())


def test_two_patterns_are_one_value():
    """Patterns compare by value, for caches."""
    assert local(3) | strided(4) == local(3) | strided(4) and hash(local(3)) == hash(pattern.Local(3, 0))
