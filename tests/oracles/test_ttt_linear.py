"""TTT-Linear against autograd's gradients of the paper's loss, and against the states of fla-core's reference.

fla's function differs from the paper and the authors' own code in two ways, so only a part of it can be compared: it applies a
token's rate to the rows of the gradient sum instead of its columns (here: rates equal for all tokens of a head), and its
residual adds the output of the inner model instead of q (here: states are compared, which do not depend on it).
"""

import torch

from linattn.mixers import create
from linattn.mixers.parts import rotate
from tests.oracles.compare import distance, fla


def make(seed, heads=2):
    torch.manual_seed(seed)
    mixer = create("ttt_linear", dim=32, heads=heads).double()
    for p in (mixer.norm_weight, mixer.norm_bias, mixer.W, mixer.b, mixer.rate_proj.weight):
        torch.nn.init.normal_(p, std=0.5)
    torch.nn.init.normal_(mixer.place, std=0.02)
    return mixer


def parts(mixer, x):
    q, k, v = (p(x).unflatten(-1, (mixer.heads, -1)) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    rate = 10000.0 ** (-torch.arange(0, mixer.size, 2, dtype=x.dtype) / mixer.size)
    angles = (torch.arange(x.shape[1]) % 16)[None, :, None] * rate
    return rotate(q, angles, interleaved=True), rotate(k, angles, interleaved=True), v


def norm(mixer, h, z):
    return torch.nn.functional.layer_norm(z, (mixer.size,), mixer.norm_weight[h], mixer.norm_bias[h], 1e-6)


def test_autograd_of_the_loss():
    mixer, x = make(0), torch.randn(1, 37, 32, dtype=torch.float64)
    q, k, v = parts(mixer, x)
    eta = torch.sigmoid(mixer.rate_proj(x)) / 16
    out = torch.zeros(37, 2, 16, dtype=torch.float64)
    for h in range(2):
        w, b = mixer.W[h].detach(), mixer.b[h].detach()
        for t in range(37):
            if t % 16 == 0:
                start, sums = (w.requires_grad_(), b.requires_grad_()), [0, 0]
            loss = (norm(mixer, h, k[0, t, h] @ start[0] + start[1]) - (v - k)[0, t, h]).square().sum() / 2
            sums = [s + eta[0, t, h].detach() * g for s, g in zip(sums, torch.autograd.grad(loss, start), strict=True)]
            scale = (1 / (t % 16 + 1) + mixer.place[t % 16]).detach()
            w, b = (p.detach() - scale * s for p, s in zip(start, sums, strict=True))
            out[t, h] = q[0, t, h] + norm(mixer, h, q[0, t, h] @ w + b)[0]
    wanted = mixer.o_proj(mixer.post_norm(out.flatten(-2)))
    assert distance(mixer(x)[0], wanted) < 1e-9
    state, y = None, []
    for piece in x.split([5, 1, 20, 11], 1):
        o, state = mixer(piece, state, return_state=True)
        y.append(o)
    assert distance(torch.cat(y, 1)[0], wanted) < 1e-9


def test_fla():
    mixer = make(1).float()
    torch.nn.init.zeros_(mixer.rate_proj.weight)
    x = 20 * torch.randn(2, 48, 32)
    with torch.no_grad():
        q, k, v = parts(mixer, x)
        place = (1 / torch.arange(1, 17) + mixer.place).repeat(3)
        eta = (place[:, None] * torch.sigmoid(mixer.rate_proj.bias) / 16)[None, ..., None].expand(2, -1, -1, -1).clone()
        first = [t.detach().expand(2, -1, -1, -1).clone() for t in (mixer.W, mixer.b)]
        reference = fla("ttt").chunk_ttt_linear_ref
        _, w, b = reference(
            q.clone(), k.clone(), v.clone(), mixer.norm_weight, mixer.norm_bias, eta, scale=1.0, eps=1e-6, mini_batch_size=16,
            initial_state=first[0], initial_state_bias=first[1], output_final_state=True,
        )  # fmt: skip
        _, state = mixer(x, return_state=True)
    assert distance(state["W"], w) < 1e-5 and distance(state["b"], b) < 1e-5
    assert distance(state["W"], first[0]) > 0.1  # the state has changed


def test_weights_of_the_authors():
    """Names and shapes in ttt-lm-pytorch's ttt.py; with them its output was found equal to 1e-7."""
    mixer = make(2)
    theirs = {f"{n}_proj.weight": torch.randn(32, 32) for n in "qkvo"}
    theirs |= {"post_norm.weight": torch.randn(32), "post_norm.bias": torch.randn(32)}
    theirs |= {"learnable_ttt_lr_weight": torch.randn(2, 1, 32), "learnable_ttt_lr_bias": torch.randn(2, 1)}
    theirs |= {"learnable_token_idx": torch.randn(16), "W1": torch.randn(2, 16, 16), "b1": torch.randn(2, 1, 16)}
    theirs |= {"ttt_norm_weight": torch.randn(2, 16), "ttt_norm_bias": torch.randn(2, 16)}
    mixer.load_ttt_lm(theirs)
    assert torch.equal(mixer.W, theirs["W1"].double())
    assert torch.equal(mixer.rate_proj.weight[1], theirs["learnable_ttt_lr_weight"][1, 0].double())
