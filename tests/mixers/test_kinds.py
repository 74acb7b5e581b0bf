"""The kinds beside causal sequence mixers: refusals, adapters, and required registration fields."""

import pytest
import torch
from torch import nn

import linattn
from linattn.mixers import CrossMixer, FeedForward, GridMixer, Resampler, create, create_bidirectional, info, over_grid
from linattn.mixers.kinds import nearly_square
from linattn.mixers.registry import register


class Across(CrossMixer):
    """Linear attention to a context, in six lines."""

    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__(dim)
        self.heads, self.q, self.kv, self.out = heads, nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def project(self, x, call):
        k, v = self.kv(call.across.tokens).unflatten(-1, (2, self.heads, -1)).unbind(2)
        return linattn.Recurrence(self.q(x).unflatten(-1, (self.heads, -1)).exp(), k.exp(), v, normalize=True, scale=1.0)

    def read(self, o, x):
        return self.out(o.flatten(-2))


def test_linear_attention_to_a_context():
    """The state is S and z, whatever the length of the context; the matrix has a row a token and a column a token of the context."""
    mixer, x, context = Across(8).double(), torch.randn(2, 5, 8).double(), torch.randn(2, 9, 8).double()
    y, state = mixer(x[:, :2], context, return_state=True)
    assert {n: list(t.shape) for n, t in state.items()} == {"S": [2, 2, 4, 4], "z": [2, 2, 4], "position": [2]}
    again, state = mixer(x[:, 2:], state=state, return_state=True)
    assert state["position"].tolist() == [5, 5]
    torch.testing.assert_close(torch.cat([y, again], 1), mixer(x, context))
    matrix = linattn.mixing_matrix(mixer, x, context)
    assert matrix.shape == (2, 2, 5, 9)
    torch.testing.assert_close(matrix.sum(-1), torch.ones(2, 2, 5).double(), rtol=0, atol=1e-4)
    seen = torch.tensor([[True] * 4 + [False] * 5, [False] * 2 + [True] * 7])
    rows = [mixer(x[b : b + 1], context[b : b + 1, seen[b]]) for b in range(2)]
    torch.testing.assert_close(mixer(x, context, context_mask=seen), torch.cat(rows))


@pytest.mark.parametrize("call", ["neither", "both", "rows", "mask", "width"])
def test_cross_refusals(call):
    mixer, x = Across(8), torch.zeros(2, 3, 8)
    _, state = mixer(x, x, return_state=True)
    calls = {
        "neither": (lambda: mixer(x), "either context or state must be given"),
        "both": (lambda: mixer(x, x, state=state), "either context or state must be given"),
        "rows": (lambda: mixer(x, x[:1]), "context must have as many rows as x, 2, but came with 1"),
        "mask": (lambda: mixer(x, state=state, context_mask=torch.ones(2, 3).bool()), "context_mask must be None with a state"),
        "width": (lambda: mixer(x, torch.zeros(2, 3, 9)), r"context must have shape \[B, T, D\] with D = 8"),
    }
    with pytest.raises(ValueError, match=calls[call][1]):
        calls[call][0]()


def test_context_mask_of_another_dtype():
    x = torch.zeros(2, 3, 8)
    with pytest.raises(ValueError, match=r"context_mask must be torch.bool of shape \[B, T\] = \[2, 3\], but came as torch.float32"):
        Across(8)(x, x, context_mask=torch.ones(2, 3))


def test_grids():
    x = torch.randn(1, 12, 32)
    bidirectional, grid = create_bidirectional("linear_transformer", dim=32), create_bidirectional("local_2d", dim=32)
    torch.testing.assert_close(over_grid(bidirectional, x, 3, 4), bidirectional(x))
    torch.testing.assert_close(over_grid(grid, x, 3, 4), grid(x, 3, 4))
    with pytest.raises(ValueError, match=r"x must have height \* width = 5 \* 2 tokens, but came with \[1, 12, 32\]"):
        grid(x, 5, 2)
    assert [nearly_square(n) for n in (0, 1, 7, 12, 4096)] == [(0, 0), (1, 1), (1, 7), (3, 4), (64, 64)]


def test_bidirectional_by_name():
    assert create_bidirectional("softmax", dim=32).causal is False
    assert info("gla").bidirectional is False and info("softmax").bidirectional and info("clustered").bidirectional
    assert info("softmax").resumable and not info("clustered").resumable and not info("local_2d").resumable
    with pytest.raises(ValueError, match="gla must be a bidirectional mixer, but it is causal"):
        create_bidirectional("gla", dim=32)
    with pytest.raises(TypeError, match="no option 'head'"):
        create_bidirectional("softmax", dim=32, head=3)


def test_what_has_no_steps_says_so():
    mixer, x = create("clustered", dim=32), torch.zeros(1, 4, 32)
    for call in (lambda: mixer(x, return_state=True), lambda: mixer(x, {"position": torch.zeros(1).long()})):
        with pytest.raises(ValueError, match="causal=False has no state, because every token reads all tokens"):
            call()
    with pytest.raises(ValueError, match="mixer must be causal, but Clustered has only a pass over all tokens"):
        linattn.check_forms(mixer)
    for name in ("clustered", "local_2d"):
        with pytest.raises(ValueError, match="mixer"):
            linattn.LMConfig(mixer=name)
    with pytest.raises(ValueError, match="a language model needs causal mixers, but causal is False"):
        linattn.LMConfig(mixer="local", mixer_options={"local": {"causal": False}})


def test_register_refuses_what_it_does_not_know():
    for option, message in ({"growth": "n^3"}, "growth must be one of n, n log n"), ({"symmetry": "mirror"}, "symmetry must be one of"):
        with pytest.raises(ValueError, match=message):
            register("x", title="x", **option)


def test_what_a_kind_must_implement():
    x = torch.zeros(1, 4, 8)
    for mixer, call, wanted in (
        (Resampler(8), lambda m: m(x, torch.ones(1, 4).bool()), "mix|project"),
        (FeedForward(8), lambda m: m(x), r"forward\(x\)"),
        (GridMixer(8), lambda m: m(x, 2, 2), "project"),
    ):
        with pytest.raises(NotImplementedError, match=wanted):
            call(mixer)


@pytest.mark.parametrize("name", [n for n in linattn.mixers.available() if info(n).kind == "feed-forward"])
def test_feed_forwards_refuse_another_width(name):
    with pytest.raises(ValueError, match=r"x must have shape \[\.\.\., D\] with D = 32, but came with \[2, 3, 31\]"):
        create(name, dim=32)(torch.randn(2, 3, 31))


@pytest.mark.parametrize("name", ["agent", "focused", "slab"])
@pytest.mark.parametrize("grid", [7, (7,), (0, 7), (7, 7.0)])
def test_tables_of_images_refuse_what_is_no_grid(name, grid):
    with pytest.raises(ValueError, match="grid must be"):
        create(name, dim=32, grid=grid)


@pytest.mark.parametrize(
    ("name", "option"), [("switch", "hidden"), ("bahdanau", "hidden"), ("conformer", "hidden"), ("mbconv", "expansion")]
)
def test_inner_widths_of_nothing_are_refused(name, option):
    with pytest.raises(ValueError, match=f"{option} must be at least 1.* came as 0"):
        create(name, dim=32, **{option: 0})


def test_feed_forwards_take_tensors_of_floating_point():
    feed = create("swiglu", dim=32)
    with pytest.raises(ValueError, match="x must be floating point, but came as torch.int64"):
        feed(torch.zeros(3, 32, dtype=torch.int64))
    with pytest.raises(TypeError, match="x must be a tensor, but came as list"):
        feed([1.0] * 32)
