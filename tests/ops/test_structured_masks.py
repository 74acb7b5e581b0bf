"""Structured masked attention, Y = (L ∘ Q Kᵀ) V (arXiv 2405.21060): with a 1-semiseparable mask it is the recurrence, and only then."""

import pytest
import torch

import linattn
from linattn.mixers import create
from linattn.mixers.inspect import mixing_matrix
from tests.ops.errors import error

B, T, H, K, V = 2, 90, 3, 4, 5  # more than a chunk


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def masked_attention(mask, q, k, v):
    """The definition, for any mask [B, H, T, T]."""
    return torch.einsum("bhij,bihk,bjhk,bjhv->bihv", mask, q, k, v)


def semiseparable(decay):
    """L_ij = a_i a_{i-1} ... a_{j+1} for i >= j: from products of the factors. ``decay`` [B, T, H]."""
    a = decay.exp()
    mask = torch.zeros(*decay.shape[::2], T, T, dtype=decay.dtype)
    for i in range(T):
        for j in range(i + 1):
            mask[:, :, i, j] = a[:, j + 1 : i + 1].prod(1)
    return mask


def arguments(seed=0):
    return normal(B, T, H, K, seed=seed), normal(B, T, H, K, seed=seed + 1), normal(B, T, H, V, seed=seed + 2)


DECAYS = {
    "none": (None, torch.zeros(B, T, H).double()),  # L = tril(1): linear attention
    "constant": (torch.tensor([0.5, 0.9, 0.99]).double().log(),) * 2,  # L_ij = γ^(i - j): RetNet
    "of the token": (-normal(B, T, H, seed=9).abs(),) * 2,  # Mamba-2
    "with zeros": (torch.where(normal(B, T, H, seed=8) > 1, -torch.inf, -normal(B, T, H, seed=9).abs()),) * 2,
}


@pytest.mark.parametrize("form", ["parallel", "chunk", "recurrent"])
@pytest.mark.parametrize("kind", DECAYS)
def test_one_semiseparable_masks_are_the_recurrence(kind, form):
    decay, logs = DECAYS[kind]
    q, k, v = arguments()
    mask = semiseparable(logs.expand(B, T, H))
    o = linattn.linear_attention(q, k, v, decay=decay, scale=1.0, form=form)
    assert error(o, masked_attention(mask, q, k, v)) < 1e-12


def test_gradients_reach_the_mask():
    q, k, v = arguments()
    decay = (-normal(B, T, H, seed=9).abs()).requires_grad_()
    weights = normal(B, T, H, V, seed=5)
    mine, theirs = (
        torch.autograd.grad((o * weights).sum(), decay)[0]
        for o in (linattn.linear_attention(q, k, v, decay=decay, scale=1.0), masked_attention(semiseparable(decay), q, k, v))
    )
    assert error(mine, theirs) < 1e-11


def test_a_sum_of_such_masks_is_a_sum_of_recurrences():
    """A mask of semiseparable rank 2, such as γ₁^(i-j) + γ₂^(i-j), needs two states."""
    q, k, v = arguments()
    decays = [torch.full((H,), g, dtype=torch.float64).log() for g in (0.5, 0.95)]
    mask = sum(semiseparable(d.expand(B, T, H)) for d in decays)
    o = sum(linattn.linear_attention(q, k, v, decay=d, scale=1.0) for d in decays)
    assert error(o, masked_attention(mask, q, k, v)) < 1e-12
    assert block_rank(mask[0, 0]) == 2


def block_rank(matrix):
    """The largest rank of a block on and below the diagonal: the state size needed."""
    return max(int(torch.linalg.matrix_rank(matrix[i:, : i + 1], rtol=1e-9)) for i in range(matrix.shape[0]))


def test_other_masks_need_more():
    """A mask of distances that is not a power, 1 / (1 + i - j), has high rank, so no fixed-size state represents it."""
    i = torch.arange(T, dtype=torch.float64)
    mask = (1 / (1 + (i[:, None] - i))).where(i[:, None] >= i, 0.0)
    assert block_rank(mask) > 5
    assert block_rank(semiseparable(DECAYS["of the token"][1])[0, 0]) == 1


def test_blocks_of_the_attention_matrix_have_the_rank_of_the_state():
    q, k, _ = arguments()
    scores = semiseparable(DECAYS["constant"][0].expand(B, T, H)) * torch.einsum("bihk,bjhk->bhij", q, k)
    assert block_rank(scores[0, 0]) == K


@pytest.mark.parametrize(("name", "size"), [("mamba2", {"head_dim": 16}), ("mamba", {})])
def test_the_mixing_matrix_of_a_state_space_model_is_semiseparable(name, size):
    torch.manual_seed(0)
    mixer = create(name, dim=32, state_size=4, **size).double()
    with torch.no_grad():
        mixer.A_log.normal_()
    x = torch.randn(1, 40, 32, dtype=torch.float64)
    matrix = mixing_matrix(mixer, x)[0, 0]
    assert 2 <= block_rank(matrix) <= 4
    if name == "mamba2":  # one factor per token: L ∘ C Bᵀ
        r = mixer.recurrence(x, linattn.mixers.CallContext(x, returning=False))
        log = r.decay[0, :, 0].cumsum(0)
        mask = (log[:, None] - log).exp().tril()
        assert error(matrix, mask * (r.q[0, :, 0] @ r.k[0, :, 0].mT)) < 1e-10
