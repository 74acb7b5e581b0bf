"""Regions of small operations, built on a CPU as for a GPU, without torch's compiler: logits equal the model's."""

import pytest
import torch

from linattn.generate import captured, regions
from linattn.generate.prefill import prefill
from linattn.mixers.attention import softmax
from linattn.ops import one_query
from tests.generate.test_capacity import HYBRIDS, loaded, model
from tests.ops.errors import error


def in_pieces(q, k, v, seen, taken):
    """Attention of one query as a GPU computes it."""
    together = one_query._together(q, k)
    return one_query.in_pieces(together, k.transpose(1, 2), v.transpose(1, 2), seen, one_query.PIECE).flatten(1, 2)[:, None]


@pytest.fixture(autouse=True)
def like_a_gpu(monkeypatch):
    """Build CPU steps like GPU steps, and run them node by node."""
    monkeypatch.setattr(captured, "FROM", {"cpu": 1})
    monkeypatch.setattr(captured, "on_gpu", lambda t: True)
    monkeypatch.setattr(captured, "Program", lambda *_: None)
    monkeypatch.setattr(regions, "_on_gpu", lambda value: value is not None)
    monkeypatch.setattr(softmax, "one_query", in_pieces)
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_written_slot_is_read(name):
    """A region that reads a cache follows the write of the token's keys and values."""
    lm = model(**HYBRIDS[name]).double()
    ids, token, logits = torch.randint(40, (3, 6)), torch.randint(40, (3,)), []
    with torch.inference_mode():
        _, state = prefill(lm.model, ids)
        step = loaded(lm, state, lambda x: logits.append(x.clone()) or x.argmax(-1))
        assert "region_" in step._module.code and "append_" in step._module.code
        for _ in range(4):
            step.tokens.copy_(token)
            step.run()
            hidden, state = prefill(lm.model, token[:, None], state)
            wanted = lm.lm_head(hidden)[:, -1]
            assert error(logits[-1], wanted) <= 1e-11
            token = wanted.argmax(-1)
