"""One query per row over a preallocated cache: in pieces and at once, against softmax attention in float64."""

import pytest
import torch
import torch.nn.functional as F

from linattn.ops import one_query
from tests.ops.errors import error

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TAKEN = 30  # of 48 slots


def in_pieces(q, k, v, seen, size):
    """The GPU's path of ``one_query``."""
    q = q[:, 0].unflatten(1, (k.shape[2], -1))
    return one_query.in_pieces(q, k.transpose(1, 2), v.transpose(1, 2), seen, size).flatten(1, 2)[:, None]


def tensors(dtype, device="cpu", groups=2):
    q, k, v = (torch.randn(2, n, heads, 8, device=device).to(dtype) for n, heads in ((1, 3 * groups), (48, 3), (48, 3)))
    seen = torch.rand(2, 48, device=device) < 0.4
    seen[:, TAKEN], seen[:, TAKEN + 1 :] = True, False
    return q, k, v, seen, torch.full((2,), TAKEN, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_it_is_softmax_attention(dtype, groups, device):
    q, k, v, seen, taken = tensors(dtype, device, groups)
    wide, keys, values = (t.double().transpose(1, 2) for t in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
    wanted = F.scaled_dot_product_attention(wide, keys, values, attn_mask=seen[:, None, None]).transpose(1, 2)
    limit = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}[dtype]
    for o in (one_query.one_query(q, k, v, seen, taken), *(in_pieces(q, k, v, seen, size) for size in (16, 48, 7))):
        assert (o.shape, o.dtype) == (q.shape, dtype) and error(o.double(), wanted) <= limit


def test_opcheck():
    q, k, v, seen, taken = tensors(torch.float32)
    torch.library.opcheck(one_query.operator, (q, k, v, seen, taken), test_utils=["test_schema", "test_faketensor"])


def test_it_has_no_gradients():
    q, k, v, seen, taken = tensors(torch.float32)
    o = one_query.one_query(q.requires_grad_(), k, v, seen, taken)
    with pytest.raises(RuntimeError, match="one_query"):
        o.sum().backward()
