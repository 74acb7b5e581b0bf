"""Random shapes and options, equally many for every kind and rank, against the reference in float64."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ops.cases import FORMS, KINDS, RANKS, Call, gradients, make
from tests.ops.errors import admitted, compare, error

EXAMPLES, SLOW_EXAMPLES = 8, 100  # for each kind at each rank
LENGTHS = st.one_of(st.integers(0, 6), st.sampled_from([15, 16, 17, 31, 33, 63, 64, 65, 127, 130]))


@st.composite
def calls(draw, kind: str, rank: str) -> Call:
    """A call of this kind and rank; everything else is drawn."""
    shared = draw(st.integers(1, 3))
    sizes = {"B": draw(st.integers(1, 3)), "T": draw(LENGTHS), "Hk": draw(st.integers(1, 2))}
    sizes |= {"K": draw(st.sampled_from([1, 2, 3, 5, 8, 17])), "V": draw(st.sampled_from([1, 2, 3, 7, 16]))}
    strong = draw(st.sampled_from([0.01, 0.5, 5.0, 800.0]))
    lengths = draw(st.none() | st.lists(LENGTHS, max_size=5).map(tuple))
    call = make(
        kind, rank, H=shared * sizes["Hk"], **sizes, lengths=lengths, initial=draw(st.booleans()),
        strength=(1e-4, strong), seed=draw(st.integers(0, 1000)),
    ).set(scale=draw(st.sampled_from([None, 1.0, 0.3])), return_state=draw(st.booleans()))  # fmt: skip
    if kind == "normalize":
        call = call.set(normalize=draw(st.sampled_from([0.5, "return"])))
    if rank != "none" and draw(st.booleans()):
        decay = call.tensors["decay"].clone()
        random = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
        call = call.with_(decay=decay.masked_fill(torch.rand(decay.shape, generator=random) < 0.1, -torch.inf))
    return call


def holds(call: Call, form: str) -> None:
    """Values, gradients and the packed index in 32 bits; unstable draws are not checked."""
    if not admitted(call):
        return
    if "cu_seqlens" in call.options:
        call = call.set(cu_seqlens=call.options["cu_seqlens"].to(torch.int32))
    out, grads = gradients(call, form=form)
    ref, wanted = gradients(call, backend="reference")
    compare(out, ref, 1e-10)
    for name, grad in grads.items():
        floor = 1e-6 * max(1.0, *(g.norm().item() for g in wanted.values()))  # where a drawn gradient is nearly nothing
        e = error(grad, wanted[name], floor)
        assert e <= 1e-10, f"gradient of {name}: error {e:.1e}"


def sweep(kind: str, rank: str, examples: int, derandomize: bool) -> None:
    count = 0

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=derandomize, print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
    @given(call=calls(kind, rank), form=st.sampled_from(FORMS))
    def run(call: Call, form: str) -> None:
        nonlocal count
        count += admitted(call)
        holds(call, form)

    run()
    assert count >= 0.9 * examples, f"only {count} of {examples} draws were tame enough to claim anything"


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_random_calls(kind, rank):
    sweep(kind, rank, EXAMPLES, derandomize=True)


@pytest.mark.slow
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_many_random_calls(kind, rank):
    sweep(kind, rank, SLOW_EXAMPLES, derandomize=False)


@settings(max_examples=20, deadline=None, database=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_random_splits(kind, data):
    """A sequence split at random positions, each piece in another form."""
    T = data.draw(st.integers(1, 140))
    cuts = sorted(data.draw(st.lists(st.integers(0, T), max_size=4)))
    call = make(kind, "BTHK", B=1, H=1, T=T, seed=data.draw(st.integers(0, 99)))
    out, states = [], {}
    for start, stop in zip([0, *cuts], [*cuts, T], strict=True):
        piece = call.tokens(start, stop).with_(**states)(data.draw(st.sampled_from(FORMS)))
        out.append(piece["o"])
        states = {n: piece[n] for n in ("S", "z") if n in piece}
    compare({"o": torch.cat(out, 1), **states}, call(backend="reference"), 1e-11)
