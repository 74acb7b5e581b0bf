"""Every rule and every rank of decay: values and gradients of all arguments, in every dtype, dense and packed."""

from itertools import product

import pytest
import torch

from tests.ops.cases import KINDS, RANKS, cotangent, make, turned
from tests.ops.errors import same_bits
from tests.ops.triton.device import DTYPES, HALVES, INTERPRETED, SIZE, check, check_tame, first, gradients, here, poisoned

# Each rank is combined with another feature: rows, shared heads, odd sizes, no initial state, sequences of every length.
TINY = {
    "none": dict(B=2, T=20, H=1, K=8, V=5),
    "H": dict(B=1, T=17, H=2, K=4, V=3, initial=False),
    "HK": dict(lengths=(3, 0, 16), H=1, K=4, V=3),
    "BTH": dict(B=1, T=36, H=2, Hk=1, K=7, V=17),
    "BTHK": dict(lengths=(0, 1, 33, 0), H=2, Hk=1, K=17, V=6),
}
REAL = {
    "none": dict(B=2, T=200, H=2, K=64, V=64),
    "H": dict(lengths=(1, 63, 0, 64, 700, 65), H=2, K=64, V=64, initial=False),
    "HK": dict(B=3, T=130, H=2, K=64, V=64),
    "BTH": dict(B=1, T=1100, H=4, Hk=2, K=128, V=128),
    "BTHK": dict(lengths=(0, 1, 700, 64, 0, 1500, 63), H=4, Hk=1, K=128, V=128),
}
SHAPES = TINY if INTERPRETED else REAL


@pytest.mark.parametrize(("dtype", "rank"), first([torch.float32, (torch.float16, "H"), (torch.float16, "HK")], product(DTYPES, RANKS)))
@pytest.mark.parametrize("kind", KINDS)
def test_every_rule_and_decay(kind, rank, dtype):
    check_tame(make(kind, rank, **SHAPES[rank]), dtype)


# (K, V): with one block of channels and several, powers of two and not, more keys than values and fewer.
HEADS = [(40, 3), (3, 18)] if INTERPRETED else [(16, 16), (64, 64), (100, 100), (16, 100), (192, 128), (128, 192), (256, 256)]


@pytest.mark.parametrize("size", HEADS, ids=str)
@pytest.mark.parametrize(("kind", "rank"), [("plain", "BTH"), ("normalize", "BTHK"), ("beta", "BTHK"), ("erase", "BTHK")])
def test_every_size_of_heads(kind, rank, size):
    K, V = size
    check_tame(make(kind, rank, B=1, T=18 if INTERPRETED else 150, H=1, K=K, V=V), HALVES[-1])


@pytest.mark.skipif(INTERPRETED, reason="only the sizes themselves could show anything")
@pytest.mark.parametrize("size", [(100, 100), (256, 256)], ids=str)
@pytest.mark.parametrize("kind", ["plain", "beta", "erase"])
def test_large_heads_in_float32(kind, size):
    K, V = size
    check_tame(make(kind, "BTHK", B=1, T=150, H=1, K=K, V=V), torch.float32)


@pytest.mark.parametrize("rank", ["BTH", "BTHK"])
@pytest.mark.parametrize("kind", ["beta", "erase", "bonus"])
def test_the_rest_in_float32(kind, rank):
    """All but q, k and v may be float32 beside half precision; many sequences, most of which start within a chunk."""

    def wide(call, outputs=None):
        extras = {name: t.float() for name, t in call.tensors.items() if name not in ("q", "k", "v")}
        out, found = gradients(call.with_(**extras), outputs)
        return out, {name: g.to(call.tensors[name].dtype) for name, g in found.items()}

    check_tame(
        make(kind, rank, **(dict(B=3, T=20, H=1, K=8, V=6) if INTERPRETED else dict(B=256, T=64, H=1, K=64, V=64))), HALVES[-1], run=wide
    )


@pytest.mark.parametrize("rank", ["BTH", "BTHK"])
@pytest.mark.parametrize("kind", ["plain", "erase"])
def test_without_a_gradient_of_the_decay(kind, rank):
    """With float32 erasing vectors, which failed to compile in Triton 3.6."""

    def fixed(call, outputs=None):
        dtype, decay = call.tensors["q"].dtype, call.tensors["decay"]
        wide = call.with_(**{name: call.tensors[name].float() for name in ("read", "write") if name in call.tensors})
        leaves = {name: t.detach().requires_grad_() for name, t in wide.tensors.items() if name != "decay"}
        with poisoned():
            out = wide.with_(**leaves)("chunk", backend="triton")
            total = sum((out[name] * cotangent(out[name])).sum() for name in outputs or out)
            found = dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))
        known = gradients(call, outputs)[1]["decay"].to(decay.dtype)
        return {n: o.detach() for n, o in out.items()}, {n: g.to(dtype) if n != "S" else g for n, g in found.items()} | {"decay": known}

    shape = dict(B=1, T=20, H=1, K=4, V=3) if INTERPRETED else dict(B=2, T=700, H=2, K=64, V=64)
    check_tame(make(kind, rank, **shape), HALVES[-1], run=fixed)


@pytest.mark.parametrize("kind", ["plain", "bonus", "normalize"])
def test_wide_keys_go_in_parts(kind, monkeypatch):
    if INTERPRETED:
        from linattn.ops.triton import linear_attention

        monkeypatch.setattr(linear_attention, "WIDEST", 5)
    K, V, T = (9, 3, 18) if INTERPRETED else (512, 512, 150)
    check(make(kind, "BTHK", B=1, T=T, H=1, K=K, V=V), HALVES[-1])


WIDE_VALUES = dict(B=1, T=18, H=4, Hk=2, K=5, V=9) if INTERPRETED else dict(B=2, T=700, H=4, Hk=2, K=128, V=256)


@pytest.mark.parametrize(("kind", "rank"), first([("bonus", "H"), ("beta", "BTH"), ("erase", "BTHK")], product(KINDS, RANKS)))
def test_wide_values_of_heads_that_share_keys(kind, rank):
    """On Hopper gradients treat such a head as several with shared keys, decays and strengths."""
    check_tame(make(kind, rank, **WIDE_VALUES), HALVES[-1])


@pytest.mark.skipif(INTERPRETED, reason="only Hopper's kernels take parts of heads")
@pytest.mark.parametrize(("kind", "rank", "V"), [("plain", "BTHK", 384), ("beta", "none", 256), ("erase", "BTHK", 256)])
def test_wide_values_between_others(kind, rank, V):
    """Heads that are not contiguous in memory, in packed sequences."""

    def between(call, outputs=None):
        v = call.tensors["v"]
        apart = torch.cat([v, v], 3)[..., :V]
        assert apart.stride(2) == 2 * V
        return gradients(call.with_(v=apart), outputs)

    check_tame(make(kind, rank, H=2, K=64, V=V, lengths=(0, 300, 1, 599)), HALVES[-1], run=between)


@pytest.mark.parametrize(("kind", "T"), list(product(KINDS, [1, 16, 17] if INTERPRETED else [1, 64, 65])))
def test_lengths_around_a_chunk(kind, T):
    check(make(kind, "BTH", B=1, T=T, H=1, **SIZE), torch.float32)


@pytest.mark.skipif(INTERPRETED, reason="takes real chunks")
@pytest.mark.parametrize(
    ("kind", "rank", "dtype"),
    [
        ("plain", "BTH", torch.bfloat16),
        ("plain", "BTHK", torch.float32),
        ("beta", "BTHK", torch.bfloat16),
        ("erase", "BTHK", torch.bfloat16),
    ],
)
def test_131072_tokens_in_one_sequence(kind, rank, dtype):
    call = make(kind, rank, B=1, T=131072, H=1, K=64, V=64, strength=(1e-4, 0.5))
    check(call, dtype, limit=1e-4 if dtype == torch.float32 else None)


FUSED = [("plain", "BTH"), ("plain", "BTHK"), ("beta", "none"), ("beta", "BTH")]
LENGTHS = [  # whole chunks and not, in segments and not
    dict(B=2, T=192),
    dict(B=2, T=333, initial=False),
    dict(lengths=(130, 3, 0, 200)),
    dict(B=1, T=2000, Hk=1),
    dict(B=1, T=4096, Hk=2, initial=False),
    dict(lengths=(2112, 64, 1, 2100), Hk=2),
]


@pytest.mark.skipif(INTERPRETED, reason="a kernel of Hopper's own")
@pytest.mark.parametrize("shape", LENGTHS, ids=str)
@pytest.mark.parametrize(("kind", "rank"), FUSED)
def test_one_kernel_that_scans_the_cotangent_and_computes_the_gradients(kind, rank, shape, monkeypatch):
    check_fused(make(kind, rank, H=4, K=128, V=128, **shape), monkeypatch)


@pytest.mark.skipif(INTERPRETED, reason="a kernel of Hopper's own")
@pytest.mark.parametrize("shape", [*LENGTHS, dict(lengths=(130, 3, 0, 200))], ids=str)
@pytest.mark.parametrize("strength", [2.0, 8.0, 30.0])  # half of the chunks exceed the range of one product, or all
def test_one_kernel_that_leaves_strong_decays_to_another(strength, shape, monkeypatch):
    call = make("plain", "BTHK", H=4, K=128, V=128, strength=(0.8 * strength, 1.2 * strength), **shape)
    odd = torch.arange(call.tensors["decay"].shape[1]) // 64 % 2 == 1
    check_fused(call.with_(decay=torch.where(odd[None, :, None, None], 0.5, 1.0) * call.tensors["decay"]), monkeypatch)


def check_fused(call, monkeypatch):
    """Check a call as with enough heads to keep all multiprocessors busy: one kernel runs the backward pass within segments."""
    from linattn.ops.triton import launch
    from linattn.ops.triton.hopper import choice
    from linattn.ops.triton.run import Run

    ran = []
    fused = Run.fused
    monkeypatch.setattr(choice, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(Run, "fused", lambda *given: ran.append(given) or fused(*given))
    launch._programs.clear()
    by_channel = "decay" in call.tensors and call.tensors["decay"].ndim == 4  # in bfloat16 only
    try:
        check_tame(call, torch.bfloat16, decay=torch.bfloat16 if by_channel else None)
    finally:
        launch._programs.clear()
    assert ran


DENSE, PACKED = (dict(B=1, T=30), dict(lengths=(17, 0, 18))) if INTERPRETED else (LENGTHS[0], LENGTHS[4])
PREPARED_ONCE = [("beta", "none"), ("beta", "BTH"), *([] if INTERPRETED else [("plain", "BTHK")])]


@pytest.mark.parametrize(
    ("kind", "rank", "shape"),
    first([("beta", "none", DENSE), ("beta", "BTH", PACKED)], [(*how, shape) for shape in (DENSE, PACKED) for how in PREPARED_ONCE]),
    ids=str,
)
def test_chunks_prepared_once_have_the_bits_of_chunks_prepared_twice(kind, rank, shape, monkeypatch):
    from linattn.ops.triton import launch
    from linattn.ops.triton.hopper import choice
    from linattn.ops.triton.run import Run

    prepared = []
    prepare = Run.prepare
    monkeypatch.setattr(choice, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(Run, "prepare", lambda run, *given: prepare(run, *given) or run.p.is_meta or prepared.append(run.p))
    sizes = SIZE if INTERPRETED else dict(K=128, V=128)
    call, found = here(make(kind, rank, H=4, **sizes, **shape)).to(HALVES[-1], HALVES[-1] if rank == "BTHK" else None), []
    for reason in (None, "this test asks for both"):
        monkeypatch.setattr(Run, "unkept", lambda run, reason=reason: reason)
        launch._programs.clear()
        prepared.clear()
        try:
            found += [gradients(call), gradients(call)]  # the second replays the first, but for the interpreter
            places = {p.data_ptr() for p in prepared}  # a first compilation prepares once more
            assert len(places) == (1 if reason is None else 2) * (1 + INTERPRETED)
        finally:
            launch._programs.clear()
    for other in found[1:]:
        for first_time, now in zip(found[0], other, strict=True):
            same_bits(first_time, now)


@pytest.mark.parametrize("kind", ["plain", "beta", "erase"])
def test_an_empty_sequence_ends_empty_where_others_have_segments(kind):
    """Only the kernel that combines segments writes its initial state."""
    lengths = (1, 0, 70, 5) if INTERPRETED else (1, 0, 2100, 5)
    check(make(kind, "BTH", lengths=lengths, H=1, **SIZE, initial=False), torch.float32)


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("kind", ["normalize", "erase"])
def test_views_that_turn_the_signs(kind, form):
    call = here(make(kind, "BTH", B=1, T=18, H=2, Hk=1, **SIZE)).to(torch.float32)
    views = call.with_(**{name: turned(t) for name, t in call.tensors.items()})
    same_bits(views(backend="triton", form=form), call(backend="triton", form=form))
