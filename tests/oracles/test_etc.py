"""ETC against loops over pairs, after the authors' FusedGlobalLocalAttention (TensorFlow), and in its limit against softmax.

Of their code the loops have: one softmax over both inputs; scores (q k + q a + b) / √d with a and b by label; labels 0 ... m for keys to
the right, m + 1 ... 2 m for those to the left, m and 2 m for all that are further away.
"""

import pytest
import torch

from linattn.mixers import create
from tests.oracles.compare import assert_graded, distance
from tests.oracles.images import shaken

OPTIONS = {"global_tokens": 3, "radius": 2, "distance": 2}


def pairs(ours, length):
    """For each token of a sequence, what it sees and by what label."""
    g, m = ours.global_tokens, ours.distance

    def apart(i, j):
        return min(j - i, m) if j >= i else m + min(i - j, m)

    def together(long, wide):
        return 2 * m + 2 if ours.segment is not None and (long - g) // ours.segment == wide else 2 * m + 1

    for i in range(length):
        seen = []
        for j in range(length):
            if i < g and j < g:
                seen.append((j, apart(i, j)))
            elif i < g:
                if not ours.hard or together(j, i) == 2 * m + 2:
                    seen.append((j, together(j, i)))
            elif j < g:
                seen.append((j, together(i, j)))
            elif abs(i - j) <= ours.radius:
                seen.append((j, apart(i, j)))
        yield i, seen


def loop(ours, x):
    g, rows = ours.global_tokens, []
    for row in x:
        out = []
        for i, seen in pairs(ours, len(row)):
            side = ours.globals if i < g else ours.long
            heads = []
            for h in range(2):
                part = slice(4 * h, 4 * h + 4)
                q, scores, values = side.q_proj(row[i])[part], [], []
                for j, label in seen:
                    same = (i < g) == (j < g)
                    k = (side.k_proj if same else side.k_other)(row[j])[part]
                    scores.append((q @ k + q @ side.relation[label, h] + side.relation_bias[label, h]) / 2)
                    values.append((side.v_proj if same else side.v_other)(row[j])[part])
                heads.append(torch.stack(scores).softmax(0) @ torch.stack(values))
            out.append(side.o_proj(torch.cat(heads)))
        rows.append(torch.stack(out))
    return torch.stack(rows)


@pytest.mark.parametrize("options", [{}, {"segment": 3}, {"segment": 2, "hard": True}], ids=str)
@pytest.mark.parametrize("length", [1, 4, 5, 12])
def test_loops(options, length):
    ours = shaken(create("etc", dim=8, heads=2, **OPTIONS, **options))
    assert_graded(ours, lambda x: loop(ours, x), torch.randn(2, length, 8, dtype=torch.float64), list(ours.parameters()))


def test_padding_of_segments():
    ours = shaken(create("etc", dim=8, heads=2, segment=2, hard=True, **OPTIONS))
    x = torch.randn(1, 12, 8, dtype=torch.float64)
    mask = torch.arange(12)[None] < 6
    assert distance(ours(x, mask=mask)[:, :6], ours(x[:, :6])) < 1e-12


def test_one_set_of_weights_and_a_wide_radius_is_softmax():
    """It reduces to a Transformer's attention then, as the authors say."""
    ours = create("etc", dim=32, global_tokens=3, radius=30).double()
    softmax = create("softmax", dim=32, causal=False, rotated=0, bias=True, out_bias=True).double()
    with torch.no_grad():
        for side in (ours.long, ours.globals):
            side.relation.zero_()
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                getattr(side, name).load_state_dict(getattr(softmax, name).state_dict())
            side.k_other.load_state_dict(softmax.k_proj.state_dict())
            side.v_other.load_state_dict(softmax.v_proj.state_dict())
    x = torch.randn(2, 30, 32, dtype=torch.float64)
    assert distance(ours(x), softmax(x)) < 1e-12


def test_refusals():
    with pytest.raises(ValueError, match="radius must be at least 1, but came as 0"):
        create("etc", dim=32, radius=0)
    with pytest.raises(ValueError, match="segment must be at least 1, but came as 0"):
        create("etc", dim=32, segment=0)
    with pytest.raises(ValueError, match="segment must be given where hard=True"):
        create("etc", dim=32, hard=True)
