"""The captured step of a GPU, traced and run with its kernels; with TRITON_INTERPRET=1 also on a CPU."""

from dataclasses import replace

import pytest
import torch

from linattn.generate import fusion, step_graph
from linattn.models import LanguageModel, LMConfig
from linattn.ops import dispatch
from linattn.ops.triton import linear_tiles
from linattn.ops.triton.linear_tiles import Tiles
from linattn.state import State
from tests.ops.errors import error
from tests.ops.triton.device import DEVICE, INTERPRETED


@pytest.fixture
def chosen(monkeypatch):
    """A function from whose call on the interpreted kernels are chosen."""

    def choose():
        if INTERPRETED:
            refusal = dispatch.device_refusal
            monkeypatch.setattr(dispatch, "device_refusal", lambda x, _: refusal(x, True))
            monkeypatch.setattr(fusion, "on_gpu", lambda t: True)

    return choose


LAUNCHES = {"gla": 5, "gated_deltanet": 6}  # of a layer with its feed-forward


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("mixer", LAUNCHES)
def test_a_step(mixer, rows, chosen, monkeypatch):
    """With counters, two programs share the channels of a tile."""
    tiles = Tiles(16, 16, 16, 1, 4, 2)
    monkeypatch.setattr(linear_tiles, "choose", lambda *_, counters, **__: replace(tiles, SPLIT=2) if counters else tiles)
    lm = LanguageModel(LMConfig(vocab_size=50, dim=32, layers=1, mixer=mixer)).to(DEVICE).eval()
    with torch.no_grad():
        tokens = torch.randint(50, (rows, 6), device=DEVICE)
        _, state = lm.model(tokens[:, :5], return_state=True)
        names = [list(layer) for layer in state.layers]
        leaves = [t.clone() for layer in state.layers for t in layer.values()]

        def step(token, *leaves):
            rest = iter(leaves)
            hidden, new = lm.model(token[:, None], State([{name: next(rest) for name in layer} for layer in names]), return_state=True)
            return [lm.lm_head(hidden)[:, -1], *(t for layer in new.layers for t in layer.values())]

        wanted = [t.clone() for t in step(tokens[:, 5], *leaves)]
        chosen()
        module = step_graph.make_step_graph(step, [tokens[:, 5], *leaves])
        got = module(tokens[:, 5], *leaves)
    for i, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        if i in module.meta["counters"]:
            assert torch.equal(mine + 1, theirs)
        else:
            assert error(mine.double(), theirs.double()) <= 1e-5
    counters = getattr(module, "_counters", None)
    assert (counters is not None) == (rows > 1) and (counters is None or not counters.any())
    in_place = sum(any(t is old for old in leaves) for t in got[1:])
    assert in_place == len(leaves)
    assert _launches(module) == LAUNCHES[mixer] + 2  # the embedding and the head


def _launches(module) -> int:
    """Number of calls other than views."""
    views = {"getitem", "unflatten", "flatten", "unsqueeze", "select", "split_with_sizes", "view_as"}
    names = (n.target.__name__.partition(".")[0] for n in module.graph.nodes if n.op == "call_function")
    return sum(name not in views for name in names)
