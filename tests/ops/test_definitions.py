"""A definition interacts only with its word."""

import pytest
import torch

from linattn.ops.definitions import definitions
from linattn.ops.pattern import attend

SPANS = [(4, 6, 10, 13), (1, 2, 7, 10)]  # the fifth and sixth of seven words, and the second
OWNER = [0, 1, 0, 0, 2, 2, 0, -1, -1, -1, -2, -2, -2]  # by token: index of the word, or of the defined word


def test_mask():
    found = definitions(7, SPANS).mask(13)
    for q, of_q in enumerate(OWNER):
        for k, of_k in enumerate(OWNER):
            both_words = of_q >= 0 and of_k >= 0
            linked = abs(of_q) == abs(of_k) and of_q != 0
            assert found[q, k] == (both_words or linked), (q, k)


def test_attention():
    """Changing a definition changes no bit of the sentence except its word's."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 13, 2, 4, dtype=torch.float64) for _ in range(3))
    y = attend(q, k, v, definitions(7, SPANS))
    other = v.clone()
    other[:, 10:] += 1
    changed = (attend(q, k, other, definitions(7, SPANS)) != y).flatten(2).any(-1)[0]
    assert changed.nonzero().flatten().tolist() == [4, 5, 10, 11, 12]


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(6, 8, 8, 9)], "words inside the 7 tokens of the sentence, but came with 6 to 8"),
        ([(0, 1, 6, 9)], "here from 7 on, but came with 6 to 9"),
        ([(0, 1, 7, 10), (1, 2, 9, 12)], "here from 10 on, but came with 9 to 12"),
    ],
)
def test_refused(spans, message):
    with pytest.raises(ValueError, match=message):
        definitions(7, spans)
