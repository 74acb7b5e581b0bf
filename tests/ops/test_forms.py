"""Every valid combination in every form has the values and gradients of the reference, in float64."""

from functools import cache

import pytest
import torch

from tests.ops.cases import FORMS, KINDS, RANKS, Call, cotangent, gradients, make, packed
from tests.ops.errors import check_gradients, compare, same_bits

LENGTHS = (0, 5, 0, 0, 64, 1, 33, 0)


@cache
def wanted(kind: str, rank: str, lengths: tuple[int, ...] | None) -> tuple[Call, dict, dict]:
    """Four heads of v over two of q and k, more than a chunk; the reference's results and gradients."""
    call = make(kind, rank, T=70, H=4, Hk=2, K=5, V=3, lengths=lengths)
    return call, *gradients(call, backend="reference")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["dense", "packed"])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_and_rank(kind, rank, lengths, form):
    call, out, grads = wanted(kind, rank, lengths)
    mine, my_grads = gradients(call, form=form)
    compare(mine, out, 1e-10)
    compare(my_grads, grads, 1e-10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("outputs", ["o", "S"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_through_one_result_alone(kind, outputs, form):
    """Unused results contribute nothing."""
    call = make(kind, "BTH", T=70)
    compare(gradients(call, outputs, form=form)[1], gradients(call, outputs, backend="reference")[1], 1e-10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("return_state", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_without_states(kind, return_state, form):
    call = make(kind, "BTHK", T=66, initial=False).set(return_state=return_state)
    out, grads = gradients(call, backend="reference")
    mine, my_grads = gradients(call, form=form)
    assert ("S" in mine) is return_state
    compare(mine, out, 1e-10)
    compare(my_grads, grads, 1e-10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_initial_state_of_zeros_is_none(kind, form):
    call = make(kind, "BTH", T=66, initial=False)
    zeros = {"S": torch.zeros(2, 2, 4, 3, dtype=torch.float64)} | (
        {"z": torch.zeros(2, 2, 4, dtype=torch.float64)} if kind == "normalize" else {}
    )
    compare(call.with_(**zeros)(form), call(form), 1e-14)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (6, 2), (5, 5)])
@pytest.mark.parametrize("kind", KINDS)
def test_shared_heads_are_repeated_heads(kind, heads, form):
    h, hk = heads
    call = make(kind, "BTHK", H=h, Hk=hk, T=20)
    apart = call.with_(**{n: call.tensors[n].repeat_interleave(h // hk, 2) for n in "qk"})
    compare(call(form), apart(form), 1e-13)
    shared, alone = gradients(call, form=form)[1], gradients(apart, form=form)[1]
    for n in "qk":
        alone[n] = alone[n].unflatten(2, (hk, h // hk)).sum(3)
    compare(shared, alone, 1e-12)


@pytest.mark.parametrize("T", [0, 1, 2, 15, 16, 17, 63, 64, 65])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_lengths(kind, form, T):
    check_gradients(make(kind, "BTHK", T=T), torch.float64, form=form)


@pytest.mark.parametrize("form", ["parallel", "chunk"])
@pytest.mark.parametrize("kind", KINDS)
def test_length_1000(kind, form):
    check_gradients(make(kind, "BTH", T=1000, B=1, strength=(1e-3, 1.0)), torch.float64, form=form)


@pytest.mark.parametrize("T", [0, 1, 65])
@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens_no_rows_no_sequences(kind, T):
    """Empty batches and empty packings keep shapes, dtypes and a gradient of the right shape."""
    for call in (make(kind, "BTHK", B=0, T=T), make(kind, "BTHK", lengths=()), make(kind, "BTHK", lengths=(0, 0))):
        for form in FORMS:
            out, grads = gradients(call, form=form)
            compare(out, call(backend="reference"), 1e-10)
            assert {n: g.shape for n, g in grads.items()} == {n: t.shape for n, t in call.tensors.items()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens_hand_the_state_on(kind, form):
    call = make(kind, "BTH", T=0)
    out = call(form)
    assert torch.equal(out["S"], call.tensors["S"]) and out["o"].shape == (2, 0, 2, 3)
    if kind == "normalize":
        assert torch.equal(out["z"], call.tensors["z"])
    nothing = call.without("S", "z")(form)
    assert not nothing["S"].any() and nothing["S"].shape == (2, 2, 4, 3)


@pytest.mark.parametrize("K", [1, 20, 64, 100, 256])
@pytest.mark.parametrize("V", [1, 20, 64, 100, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_head_sizes(kind, K, V):
    check_gradients(sized(kind, 66, K, V), torch.float64, form="chunk")


def sized(kind: str, T: int, K: int, V: int) -> Call:
    """With K = 1 a normalised output depends on q only through eps, which is large enough here not to be rounding."""
    call = make(kind, "BTHK", B=1, T=T, H=1, K=K, V=V)
    return call.set(normalize=0.1) if kind == "normalize" else call


@pytest.mark.parametrize("form", ["parallel", "recurrent"])
@pytest.mark.parametrize(("K", "V"), [(1, 100), (100, 1), (20, 64), (1, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_head_sizes_of_the_other_forms(kind, K, V, form):
    check_gradients(sized(kind, 18, K, V), torch.float64, form=form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_handed_over_at_any_split(kind, form):
    call = make(kind, "BTHK", T=131, B=1)
    whole = call(form)
    for split in (0, 1, 31, 63, 64, 65, 100, 128, 130, 131):
        head = call.tokens(0, split)(form)
        tail = call.tokens(split, 131).with_(**{n: head[n] for n in ("S", "z") if n in head})(form)
        compare({**tail, "o": torch.cat([head["o"], tail["o"]], 1)}, whole, 1e-12, f"split at {split}")


@pytest.mark.parametrize("rank", ["H", "HK"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_constant_decay_is_handed_over_too(kind, rank):
    call = make(kind, rank, T=131, B=1)
    head = call.tokens(0, 77)("chunk")
    tail = call.tokens(77, 131).with_(**{n: head[n] for n in ("S", "z") if n in head})("chunk")
    compare({**tail, "o": torch.cat([head["o"], tail["o"]], 1)}, call("chunk"), 1e-12)


@pytest.mark.parametrize("forms", [("chunk", "recurrent"), ("parallel", "chunk"), ("recurrent", "parallel")])
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_in_one_form_and_go_on_in_another(kind, forms):
    call = make(kind, "BTH", T=80)
    head = call.tokens(0, 70)(forms[0])
    tail = call.tokens(70, 80).with_(**{n: head[n] for n in ("S", "z") if n in head})(forms[1])
    compare({**tail, "o": torch.cat([head["o"], tail["o"]], 1)}, call(backend="reference"), 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_at_a_time(kind):
    """Decoding with one token per call and default form and backend."""
    call, outs = make(kind, "BTHK", T=5), []
    states = {n: call.tensors[n] for n in ("S", "z") if n in call.tensors}
    for t in range(5):
        out = call.tokens(t, t + 1).with_(**states)("auto", "auto")
        outs.append(out["o"])
        states = {n: out[n] for n in states}
    compare({"o": torch.cat(outs, 1), **states}, call(backend="reference"), 1e-13)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_is_separate(kind, rank, form):
    """Empty sequences first, last and adjacent; sequences not aligned with chunks."""
    call = make(kind, rank, lengths=LENGTHS)
    parts = [call.sequence(n) for n in range(len(LENGTHS))]
    out = call(form)
    compare(out, packed(out, [p(form) for p in parts]), 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_many_short_sequences(kind):
    lengths = tuple(n % 4 for n in range(150))
    call = make(kind, "BTHK", lengths=lengths, H=1)
    out, grads = gradients(call, form="chunk")
    ref, ref_grads = gradients(call, backend="reference")
    compare(out, ref, 1e-10)
    compare(grads, ref_grads, 1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_one_packed_sequence_is_a_row(kind):
    call = make(kind, "BTH", B=1, T=130)
    one = call.set(cu_seqlens=torch.tensor([0, 130], dtype=torch.int32))
    compare(one("chunk"), call("chunk"), 1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_strides_do_not_matter(kind, form):
    """Transposed, expanded and sliced arguments: heads first in memory, every second token, one decay for all rows."""
    call = make(kind, "BTHK", T=140)
    plain = call.tokens(0, 70)
    odd = {n: torch.stack([t, torch.full_like(t, torch.nan)], -1)[..., 0] for n, t in plain.tensors.items()}
    odd |= {n: plain.tensors[n].transpose(1, 2).contiguous().transpose(1, 2) for n in "qk"}
    odd["decay"] = plain.tensors["decay"][:1].expand(2, -1, -1, -1)
    plain = plain.with_(decay=odd["decay"].contiguous())
    compare(gradients(plain.with_(**odd), form=form)[1], gradients(plain, form=form)[1], 1e-12)
    compare(plain.with_(**odd)(form), plain(form), 1e-13)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_arguments_are_left_as_they_were_and_twice_is_the_same(kind, form):
    call = make(kind, "BTH", T=67)
    before = {n: t.clone() for n, t in call.tensors.items()}
    once, twice = gradients(call, form=form), gradients(call, form=form)
    same_bits(once[0], twice[0])
    same_bits(once[1], twice[1])
    same_bits(call.tensors, before)


@pytest.mark.parametrize("form", FORMS)
def test_only_some_arguments_want_a_gradient(form):
    for kind in KINDS:
        call = make(kind, "BTHK", T=20)
        every = gradients(call, form=form)[1]
        for name in call.tensors:
            leaf = call.tensors[name].clone().requires_grad_()
            out = call.with_(**{name: leaf})(form)
            with_graph = [o for o in out.values() if o.requires_grad]
            (grad,) = torch.autograd.grad(with_graph, leaf, [cotangent(o) for o in with_graph])
            compare({name: grad}, {name: every[name]}, 1e-13)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_zeros_have_gradients_like_any_other_number(request, kind, dtype, form):
    """Keys of one channel, zero-initialised values and erases, no decay: zeros must be trainable."""
    if dtype == torch.float32 and (kind, form) in (("beta", "chunk"), ("beta", "parallel"), ("erase", "parallel")):
        # All K = 4 channels have been erased, and the first state's gradient is the difference of two large terms.
        request.applymarker(
            pytest.mark.xfail(reason="misses 1e-5: the gradient of S is off by 1e-4 to 1e-2 of almost nothing", strict=True)
        )
    call = make(kind, "BTHK", B=1, T=80, H=1)
    some = {n: t * (torch.rand(t.shape, generator=torch.Generator().manual_seed(1)) < 0.5) for n, t in call.tensors.items()}
    # For the same reason that of erase in chunks errs by 7.7e-6 to 1.03e-5, depending on the order of sums in matrix products.
    limit = 2e-5 if (kind, dtype, form) == ("erase", torch.float32, "chunk") else None
    check_gradients(call.with_(**some), dtype, form=form)
    for name, t in call.tensors.items():
        if kind != "normalize" or name not in ("q", "k"):  # the denominator would be 0
            check_gradients(call.with_(**{name: torch.zeros_like(t)}), dtype, limit=limit if name == "q" else None, form=form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e-6, 1e6, 1e12])
@pytest.mark.parametrize("kind", ["plain", "beta", "erase", "bonus"])
def test_the_output_scales_with_tiny_and_huge_values(kind, size, form):
    """float32 represents uniformly small or large numbers; none underflows."""
    call = make(kind, "BTHK", T=80).to(torch.float32)
    scaled = call.with_(v=call.tensors["v"] * size, S=call.tensors["S"] * size)
    check_gradients(scaled, torch.float32, form=form)
    if kind in ("plain", "bonus"):
        check_gradients(call.with_(k=call.tensors["k"] * size, S=call.tensors["S"] * size), torch.float32, form=form)
