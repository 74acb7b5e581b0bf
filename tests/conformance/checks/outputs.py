"""Checks of one pass: shapes, causality, independence of rows, seeds, extreme numbers."""

from __future__ import annotations

from copy import deepcopy
from functools import cache, partial

import torch
from torch import Tensor

import linattn.mixers
from tests.conformance.tools import TOKENS, WIDTH, Make, assert_bits, assert_finite, assert_same, build, called, picked, tokens, weighed

MANY = 700  # tokens, more than a window or a block has


def check_shape(make: Make) -> None:
    """Outputs have the shape and dtype of the tokens, states one row a sequence and its position; T = 0 and T = 1 are supported."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        mixer = build(make, dtype=dtype)
        for length in (5, 1, 0):
            x = tokens(2, length, dtype=dtype).requires_grad_()
            y, state = mixer(x, return_state=True)
            what = f"{length} tokens of {dtype}"
            assert isinstance(y, Tensor) and y.shape == x.shape, f"{what}: the output has shape {list(y.shape)}"
            assert y.dtype == dtype, f"{what}: the output is {y.dtype}"
            assert all(t.shape[0] == 2 for t in state.values()), (
                f"{what}: states { ({n: list(t.shape) for n, t in state.items()}) } of 2 rows"
            )
            assert_bits(state["position"], torch.tensor([length] * 2), f"{what}: the position")
            y.sum().backward()
            assert x.grad is not None and x.grad.shape == x.shape
            assert isinstance(mixer(x), Tensor), "without return_state the output alone is returned"


def check_empty(make: Make) -> None:
    """Empty calls do not change the state, at the start or later."""
    mixer = build(make)
    x, none, further = tokens(2, 5), tokens(2, 0), tokens(2, 3, seed=2)
    _, state = mixer(x, return_state=True)
    _, after = mixer(none, state, return_state=True)
    assert_same({"y": mixer(further, after)}, {"y": mixer(further, state)}, "after no tokens")
    _, start = mixer(none, return_state=True)
    assert_same({"y": mixer(x, start)}, {"y": mixer(x)}, "after no tokens at the start")


def check_widths(make: Make) -> None:
    """The defaults support every multiple of 32 as width."""
    for dim in (32, 96, 160):
        x = tokens(1, 3, dim, dtype=torch.float32)
        y = build(make, dim=dim, dtype=torch.float32)(x)
        assert y.shape == x.shape
        assert_finite(y, f"the output of width {dim}")


def check_options(make: Make) -> None:
    """An option that does not exist is an error."""
    try:
        make(dim=WIDTH, no_such_option=1)
    except TypeError:
        return
    raise AssertionError("an unknown option was swallowed")


def check_causality(make: Make) -> None:
    """Later tokens do not change earlier outputs: no bit for equal layouts, 1e-12 for a cut sequence."""
    mixer, x = build(make), tokens(2, TOKENS)
    y = mixer(x)
    for t in (1, 5, TOKENS - 1):
        changed = torch.cat([x[:, :t], 100 * tokens(2, TOKENS - t, seed=2)], 1)
        assert_bits(mixer(changed)[:, :t], y[:, :t], f"other tokens from {t} on: the output before")
        assert_same({"the output": mixer(x[:, :t])}, {"the output": y[:, :t]}, f"cut at {t}", 1e-12)


def check_past(make: Make) -> None:
    """The past is used: gradients of the last token's output reach the first token."""
    mixer, x = build(make), tokens(2, TOKENS).requires_grad_()
    last = mixer(x)[:, -1]
    (gradient,) = torch.autograd.grad(weighed(last), x)
    size = gradient.norm(dim=-1)  # [B, T]
    assert (size[:, 0] > 1e-9 * size[:, -1]).all(), (
        f"the gradient of the first token is {size[:, 0].tolist()}, of the last {size[:, -1].tolist()}"
    )


def check_rows(make: Make) -> None:
    """Rows of a batch, and packed sequences, are independent: another row's NaN changes no bit, nor a gradient."""
    mixer, x = build(make), tokens(3, TOKENS)
    _, state = mixer(tokens(3, 4, seed=5), return_state=True)
    for before, what in ((None, "a batch"), (state, "a batch with states")):
        y = mixer(x, before)
        alone = mixer(x[1:2], None if before is None else picked(before, 1))
        assert_same({"the output": y[1:2]}, {"the output": alone}, f"a row in {what}", 1e-12)
        _assert_untouched(x, y, lambda x, before=before: mixer(x, before), what)
    packed, cu = x.reshape(1, -1, WIDTH), torch.arange(4) * TOKENS
    for before, what in ((None, "packed"), (state, "packed with states")):
        call = lambda x, before=before: mixer(x.reshape(1, -1, WIDTH), before, cu_seqlens=cu).reshape(x.shape)  # noqa: E731
        _assert_untouched(x, mixer(packed, before, cu_seqlens=cu).reshape(x.shape), call, what)


def _assert_untouched(x: Tensor, y: Tensor, call, what: str) -> None:
    """Rows 0 and 2 of ``call(x)`` stay ``y`` and get finite gradients while row 1 is NaN."""
    poisoned = x.clone()
    poisoned[1, 3] = torch.nan
    poisoned.requires_grad_()
    ours = call(poisoned)
    for row in (0, 2):
        assert_bits(ours[row].detach(), y[row].detach(), f"{what}: row {row} beside a row with NaN")
    (gradient,) = torch.autograd.grad(ours[[0, 2]].sum(), poisoned)
    assert_finite(gradient[[0, 2]], f"{what}: the gradient of rows beside a row with NaN")


def check_distinct(make: Make) -> None:
    """No other registered mixer is the same function: same weights where they fit, else the same seed."""
    mixer = build(make)
    shapes, y = _shapes(mixer.state_dict()), called(mixer, tokens(2, TOKENS))
    for name in linattn.mixers.available():
        info = linattn.mixers.info(name)
        if info.kind != mixer.info.kind or info.cls is type(mixer):
            continue
        if info.kind == "sequence" and not (info.causal if mixer.causal else info.bidirectional):
            continue
        other, theirs = _other(name, mixer.causal)
        if _shapes(other.state_dict()) == shapes:
            other = deepcopy(other)
            other.load_state_dict(mixer.state_dict())
            theirs = called(other, tokens(2, TOKENS))
        if theirs.shape == y.shape and (y - theirs).abs().max() <= 1e-6 * y.abs().max():
            ours, theirs = (called(m, tokens(1, MANY)) for m in (mixer, other))  # few tokens may all be in one window
            assert (ours - theirs).abs().max() > 1e-6 * ours.abs().max(), f"{mixer.info.name} and {name} compute the same"


@cache
def _other(name: str, causal: bool) -> tuple[linattn.mixers.Mixer, Tensor]:
    """A mixer and its output for the tokens of :func:`check_distinct`."""
    create = linattn.mixers.create
    made = create if causal or linattn.mixers.info(name).kind != "sequence" else linattn.mixers.create_bidirectional
    mixer = build(partial(made, name))
    return mixer, called(mixer, tokens(2, TOKENS))


def _shapes(weights: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in weights.items()}


def check_seed(make: Make) -> None:
    """The same seed gives the same weights, and the same weights the same bits: outputs and gradients."""
    first, second = _fresh(make), _fresh(make)
    for name, t in first.state_dict().items():
        assert_bits(second.state_dict()[name], t, f"{name} after the same seed")
    runs = []
    for mixer in (first, second, first):
        x = tokens(2, TOKENS, dtype=torch.float32).requires_grad_()
        y = called(mixer, x)
        runs.append([y, *torch.autograd.grad(weighed(y), [x, *mixer.parameters()], materialize_grads=True)])
    for run in runs[1:]:
        for ours, theirs in zip(run, runs[0], strict=True):
            assert_bits(ours, theirs, "outputs and gradients of the same weights")


def _fresh(make: Make) -> linattn.mixers.Mixer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return make(dim=WIDTH)


def check_finite(make: Make) -> None:
    """Hard tokens give finite outputs, states and gradients in bfloat16 and under autocast, and a state made so is accepted again."""
    x, length = tokens(2, 24, dtype=torch.float32), 24
    hard = {
        "large tokens": 1e4 * x[0],
        "tiny tokens": 1e-20 * x[0],
        "constant tokens": torch.full_like(x[0], 3.0),
        "equal tokens": x[1, :1].expand(length, -1),
        "zeros": torch.zeros_like(x[0]),
    }
    batch = torch.stack(list(hard.values()))
    _assert_hard(build(make, dtype=torch.bfloat16), batch.bfloat16(), list(hard), "bfloat16")
    with torch.autocast("cpu", torch.bfloat16):
        _assert_hard(build(make, dtype=torch.float32), batch, list(hard), "autocast")


def _assert_hard(mixer: linattn.mixers.Mixer, x: Tensor, kinds: list[str], what: str) -> None:
    x = x.clone().requires_grad_()
    y, state = mixer(x, return_state=True)
    step = mixer(x[:, :1], state)
    for i, kind in enumerate(kinds):
        assert_finite(y[i], f"{what}, {kind}: the output")
        assert_finite(step[i], f"{what}, {kind}: the output after the state")
        for name, t in state.items():
            assert_finite(t[i], f"{what}, {kind}: the state {name!r}")
    loss = weighed(y) + weighed(step)
    names, parameters = zip(("the tokens", x), *mixer.named_parameters(), strict=True)
    for name, gradient in zip(names, torch.autograd.grad(loss, parameters, materialize_grads=True), strict=True):
        assert_finite(gradient, f"{what}: the gradient of {name}")
