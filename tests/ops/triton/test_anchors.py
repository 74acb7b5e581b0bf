"""Decays per channel between those that one anchor of a chunk serves and those that two do, and numbers at the ends of their range."""

from itertools import product

import pytest
import torch
import triton.language as tl

from linattn.ops.triton import anchors, hopper, launch, run
from tests.ops import cases
from tests.ops.cases import make
from tests.ops.triton.device import INTERPRETED, SIZE, check, first, here, values

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities under the interpreter
CHUNK = 16 if INTERPRETED else 64
SHAPE = dict(B=1, T=2 * CHUNK + 5, H=2) | SIZE
RULES = ("plain", "beta", "erase", "bonus")
DTYPES = (torch.float32, torch.bfloat16)
ONE_EACH = list(zip(RULES, DTYPES * 2, strict=True))
LN2 = 0.6931
SIZES = (1e3, 1e-3)


@pytest.fixture(autouse=True)
def portable(monkeypatch):
    """Neither kernels for Hopper nor launches that were recorded with other ``ANCHORS`` run."""
    monkeypatch.setattr(hopper, "_hopper", lambda device: False)
    monkeypatch.setattr(launch, "_programs", {})


def half(dtype: torch.dtype) -> int:
    """Tokens of half a chunk."""
    return CHUNK // 2 if INTERPRETED or dtype == torch.bfloat16 else CHUNK // 4


def strength(dtype: torch.dtype, halves: float) -> tuple[float, float]:
    """Strength of decays that sum to ``halves`` times the range of one anchor in a half of a chunk."""
    kind = tl.float32 if dtype == torch.float32 else tl.bfloat16
    decay = halves * 2 * anchors.within_range(kind).value * LN2 / half(dtype)
    return 0.9 * decay, decay


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize(("halves", "dtype"), first([(0.49, DTYPES[0]), (0.99, DTYPES[1])], product([0.49, 0.99], DTYPES)))
def test_no_other_launch_is_needed(halves, dtype, kind, monkeypatch):
    """Memory that no launch writes is NaN. A chunk of two halves at half of the range has one anchor, others two."""
    monkeypatch.setattr(run, "ANCHORS", (1,) if halves < 0.5 else (1, 2))
    check(make(kind, "BTHK", **SHAPE, strength=strength(dtype, halves)), dtype)


@pytest.mark.parametrize(("kind", "dtype"), first(ONE_EACH, product(RULES, DTYPES)))
def test_a_weak_half_beside_a_strong_one(kind, dtype, monkeypatch):
    """Then weights across the middle of a chunk, and from its start or to its end, count; every second channel has the weak half first."""
    monkeypatch.setattr(run, "ANCHORS", (1, 2))
    call = make(kind, "BTHK", **SHAPE, strength=strength(dtype, 1.0))
    decay = call.tensors["decay"]
    early = torch.arange(decay.shape[1]) // half(dtype) % 2 == 0
    weak = early[:, None, None] == (torch.arange(decay.shape[3]) % 2 == 0)
    check(call.with_(decay=torch.where(weak, 0.06, 0.97) * decay.min().expand(decay.shape)), dtype)


@pytest.mark.parametrize(("kind", "dtype"), first(RULES[:2], list(product(RULES, DTYPES))))
def test_strengths_differ_between_halves_channels_and_packed_sequences(kind, dtype):
    """Each half of a chunk and block of 8 channels has its own, beyond any anchor in the last chunk, with resets there."""
    call = make(kind, "BTHK", lengths=(CHUNK + 3, 0, 5, 3 * CHUNK), H=1, K=80 if INTERPRETED else 128, V=SIZE["V"])
    random = torch.Generator().manual_seed(1)
    tokens, _, channels = call.tensors["decay"].shape[1:]
    times = torch.tensor([0.01, 0.3, 0.7, 0.9])[torch.randint(4, (tokens // half(dtype) + 1, 1, channels // 8), generator=random)]
    times = times.repeat_interleave(half(dtype), 0)[:tokens].repeat_interleave(8, -1)
    decay = -times * strength(dtype, 1.0)[1] * (0.8 + 0.2 * torch.rand(times.shape, generator=random))
    decay[-CHUNK // 2 :, :, -8:] *= 5.0
    decay[-CHUNK:][torch.rand(decay[-CHUNK:].shape, generator=random) < 0.002] = -torch.inf
    check(call.with_(decay=decay[None].double()), dtype)


def test_one_program_finds_the_last_of_many_chunks(monkeypatch):
    """It looks at 32 at a time."""
    monkeypatch.setattr(run, "LEFT", 1)
    call = make("plain", "BTHK", **SHAPE | {"T": 17 * CHUNK}, strength=0.01)
    call.tensors["decay"][:, -CHUNK // 2 :] = -20.0
    check(call, torch.float32)


def test_a_reset_is_out_of_range(monkeypatch):
    """A chunk with one is left to the levels, as its memory shows, which no launch writes."""
    monkeypatch.setattr(run, "ANCHORS", (1, 2))
    call = here(make("plain", "BTHK", **SHAPE, strength=0.001)).to(DTYPES[-1])
    call.tensors["decay"][:, CHUNK + 1, 0, 0] = -torch.inf
    nan = values(call)["o"].isnan().any(-1)
    assert nan[:, CHUNK:, 0].all() and not nan[:, :CHUNK].any() and not nan[:, :, 1].any()


@pytest.mark.parametrize(("kind", "size"), first(list(zip(RULES, SIZES * 2, strict=True)), product(RULES, SIZES)))
def test_large_and_small_numbers_at_the_ends_of_the_range(kind, size, monkeypatch):
    """Without overflow or loss of digits: queries, and keys where the rule allows, of ``size``; small ones with a small cotangent."""
    cotangent = 1.0 if size > 1 else 1e-8
    original = cases.cotangent
    monkeypatch.setattr(cases, "cotangent", lambda like, seed=0: original(like, seed) * cotangent)
    monkeypatch.setattr(run, "ANCHORS", (1, 2))
    call = make(kind, "BTHK", **SHAPE, strength=strength(torch.bfloat16, 0.99), seed=int(size > 1))
    scaled = [name for name in ("q", "k") if name == "q" or kind in ("plain", "bonus")]
    call = call.with_(**{name: call.tensors[name] * size for name in scaled})
    check(call, DTYPES[-1])
