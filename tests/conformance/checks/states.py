"""Checks of states: splitting, packing, padding and storing a sequence give the numbers of one pass."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import linattn
from linattn import State
from linattn.mixers import Mixer
from tests.conformance.checks.calls import LENGTHS, grows_as
from tests.conformance.tools import TOKENS, WIDTH, Make, Route, States, assert_bits, assert_same, build, outcome, picked, tokens


def check_resume(make: Make) -> None:
    """One pass, chunk by chunk (an empty one among them) and token by token agree, gradients through the states included."""
    mixer, x = build(make), tokens(2, TOKENS)
    whole = outcome(mixer, cut(mixer, [TOKENS]), x)
    for sizes in ([1] * TOKENS, [5, 0, 1, 4, 2], [TOKENS - 1, 1]):
        assert_same(outcome(mixer, cut(mixer, sizes), x), whole, f"chunks of {sizes}")


def cut(mixer: Mixer, sizes: list[int]) -> Route:
    def route(x: Tensor) -> tuple[Tensor, list[States]]:
        outputs, state = [], None
        for part in x.split(sizes, 1):
            y, state = mixer(part, state, return_state=True)
            outputs.append(y)
        return torch.cat(outputs, 1), [state]

    return route


def check_packed(make: Make) -> None:
    """Sequences packed end to end, empty ones among them, equal separate calls, from the start and from states."""
    mixer, lengths = build(make), [0, 66, 1, 0, 6, 0]  # one longer than a chunk
    cu = torch.tensor([0, *lengths]).cumsum(0)
    x, past = tokens(1, sum(lengths)), tokens(len(lengths), 3, seed=5)

    def packed(x: Tensor, past: Tensor | None = None) -> tuple[Tensor, list[States]]:
        y, state = mixer(x, _after(mixer, past), return_state=True, cu_seqlens=cu)
        return y, [state]

    def alone(x: Tensor, past: Tensor | None = None) -> tuple[Tensor, list[States]]:
        parts = x.split(lengths, 1)
        pasts = [None] * len(parts) if past is None else [past[n : n + 1] for n in range(len(parts))]
        outputs, states = zip(*(mixer(p, _after(mixer, b), return_state=True) for p, b in zip(parts, pasts, strict=True)), strict=True)
        return torch.cat(outputs, 1), list(states)

    for inputs, what in (((x,), "packed"), ((x, past), "packed after states")):
        assert_same(outcome(mixer, packed, *inputs), outcome(mixer, alone, *inputs), what)
    narrow = mixer(x, cu_seqlens=cu.int())
    assert_bits(narrow, mixer(x, cu_seqlens=cu), "cu_seqlens of 32 bits")


def check_padding(make: Make) -> None:
    """Padding before, after and between the tokens, all of a row or none of it, changes nothing, from the start and from states."""
    mixer = build(make)
    mask = torch.tensor(
        [[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [0, 1, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]]
    ).bool()
    rows = range(len(mask))
    x, past = tokens(*mask.shape), tokens(len(mask), 3, seed=5)

    def padded(x: Tensor, past: Tensor | None = None) -> tuple[Tensor, list[States]]:
        y, state = mixer(x, _after(mixer, past), return_state=True, mask=mask)
        return y[mask], [state]

    def alone(x: Tensor, past: Tensor | None = None) -> tuple[Tensor, list[States]]:
        pasts = [None if past is None else past[b : b + 1] for b in rows]
        runs = [mixer(x[b, mask[b]][None], _after(mixer, pasts[b]), return_state=True) for b in rows]
        return torch.cat([y[0] for y, _ in runs]), [state for _, state in runs]

    for inputs, what in (((x,), "padded"), ((x, past), "padded after states")):
        assert_same(outcome(mixer, padded, *inputs), outcome(mixer, alone, *inputs), what)
    y = mixer(x, mask=mask)
    assert_bits(mixer(torch.where(mask[..., None], x, 50.0), mask=mask), y, "other padding")
    assert not y[~mask].any(), "the output of padding is 0"


def _after(mixer: Mixer, past: Tensor | None) -> States | None:
    """The states after ``past`` [N, T, D]: every row has its own."""
    return None if past is None else mixer(past, return_state=True)[1]


@torch.no_grad()  # with a graph torch itself would raise
def check_untouched(make: Make) -> None:
    """A call changes neither its tokens nor the state it was given, so a state can be continued many times."""
    mixer, x = build(make), tokens(2, 5)
    _, state = mixer(tokens(2, 4, seed=5), return_state=True)
    copy, tokens_before = State([state]).clone().layers[0], x.clone()
    first = [mixer(x, state), mixer(x[:, :1], state)]
    mixer(x.reshape(1, -1, WIDTH), state, cu_seqlens=torch.tensor([0, 5, 10]))
    mixer(x, state, mask=torch.ones(2, 5).bool())
    for name, t in copy.items():
        assert_bits(state[name], t, f"the state {name!r} after it was used")
    assert_bits(x, tokens_before, "the tokens")
    for ours, theirs in zip([mixer(x, state), mixer(x[:, :1], state)], first, strict=True):
        assert_bits(ours, theirs, "a state continued twice")


def check_saved(make: Make) -> None:
    """A state from a file continues exactly, as do selected and forked rows."""
    for dtype in (torch.float32, torch.bfloat16):
        mixer, further = build(make, dtype=dtype), tokens(2, 3, seed=2, dtype=dtype)
        _, state = mixer(tokens(2, 7, dtype=dtype), return_state=True)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.safetensors"
            State([state, {}]).save(path)
            loaded = State.load(path).layers[0]
        (y, after), (theirs, their_after) = (mixer(further, s, return_state=True) for s in (state, loaded))
        assert_bits(theirs, y, f"{dtype}: the output after a loaded state")
        assert list(after) == list(their_after)
        for name, t in after.items():
            assert_bits(their_after[name], t, f"{dtype}: the state {name!r} after a loaded state")
    mixer, further = build(make), tokens(2, 3, seed=2)
    _, state = mixer(tokens(2, 7), return_state=True)
    y, swapped = mixer(further, state), mixer(further.flip(0), picked(state, 1, 0))
    assert_same({"the output": swapped.flip(0)}, {"the output": y}, "rows picked in another order", 1e-12)
    forked = mixer(further.repeat_interleave(2, 0), State([state]).fork(2).layers[0])
    assert_same({"the output": forked}, {"the output": y.repeat_interleave(2, 0)}, "rows forked", 1e-12)


def check_state_bytes(make: Make) -> None:
    """The bytes of a state are what the cost sheet says (asked once for each dtype and length), and grow with the sequence exactly if
    ``info`` says so; its tensors are not views of larger memory. The sheet's parameters are those of the mixer."""
    info = build(make).info
    for dtype, asked in ((torch.float32, 8), (torch.bfloat16, 80)):
        mixer, sizes = build(make, dtype=dtype), []
        for length in (8, 80):
            _, state = mixer(tokens(2, length, dtype=dtype), return_state=True)
            sizes.append(State([state]).nbytes)
            if length == asked:
                said = linattn.cost(info.name, dim=WIDTH, tokens=length, batch=2, dtype=dtype)
                assert sizes[-1] == said.state_bytes, (
                    f"{dtype}, {length} tokens: the state has {sizes[-1]} bytes, cost says {said.state_bytes}"
                )
                assert sum(p.numel() for p in mixer.parameters()) == said.parameters
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in state.values()}
            held = sum(storages.values())
            assert held <= sizes[-1], f"{dtype}, {length} tokens: the state has {sizes[-1]} bytes but keeps {held} in memory"
        assert (sizes[0] == sizes[1]) == info.recurrent, f"{dtype}: {sizes} bytes after 8 and 80 tokens, but recurrent is {info.recurrent}"


def check_growth(make: Make) -> None:
    """Operations grow no faster with the tokens than ``info.growth`` says, and do grow so where it is beyond n."""
    mixer = build(make, dtype=torch.float32)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        counts = [mixer.flops(torch.empty(1, n, WIDTH)) for n in LENGTHS]
    grows_as(mixer.info.growth, "operations", *counts)
