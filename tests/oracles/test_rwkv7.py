"""RWKV-7's time mixing, and a whole model of it, against the authors' package with the same weights."""

import pytest
import torch

from linattn.mixers import create
from linattn.models import LanguageModel, LMConfig
from tests.oracles.compare import distance
from tests.oracles.rwkv import package, scattered

DIM, HEADS = 64, 2
NAMES = ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g", "w0", "w1", "w2", "a0", "a1", "a2", "v0", "v1", "v2", "g1", "g2", "k_k", "k_a", "r_k")
LINEARS = ("receptance", "key", "value", "output")


def weights():
    """Weights of a layer as stored by training code; v0, v1 and v2 exist unused in the first layer too."""
    random = torch.Generator().manual_seed(0)
    shapes = {**dict.fromkeys(NAMES, (DIM,)), **{f"{n}1": (DIM, 32) for n in "wavg"}, **{f"{n}2": (32, DIM) for n in "wavg"}}
    shapes |= {"r_k": (HEADS, DIM // HEADS), **{f"{n}.weight": (DIM, DIM) for n in LINEARS}, "ln_x.weight": (DIM,), "ln_x.bias": (DIM,)}
    scale = {name: 2.0 if name in ("w0", "a0") else 0.3 for name in shapes}
    return {name: scale[name] * torch.randn(shape, generator=random) for name, shape in shapes.items()}


def theirs(w, x, state=None):
    """x [T, D] -> outputs, the last state [H, V, K]."""
    state = torch.zeros(HEADS, DIM // HEADS, DIM // HEADS) if state is None else state
    matrices = [w[f"{name}.weight"].T for name in LINEARS]
    names = [w[name].flatten() if name == "r_k" else w[name] for name in NAMES]
    arguments = (*names, *matrices, w["ln_x.weight"], w["ln_x.bias"])
    y, _, state, _ = package(seven=True).RWKV_x070_TMix_seq(0, HEADS, DIM // HEADS, x, torch.zeros(DIM), torch.empty(0), state, *arguments)
    return y, state


@pytest.mark.parametrize("tokens", [1, 75])
def test_values_states_and_gradients(tokens):
    w, mixer = weights(), create("rwkv7", dim=DIM, head_size=DIM // HEADS)
    mixer.load_rwkv({name: t.view(1, 1, -1) if t.ndim == 1 and "ln" not in name else t for name, t in w.items()})
    x = torch.randn(2, tokens, DIM, requires_grad=True)
    y, state = mixer(x, return_state=True)
    rows = [theirs(w, row) for row in x]
    assert distance(y, torch.stack([y for y, _ in rows])) < 1e-5
    assert distance(state["S"].mT, torch.stack([s for _, s in rows])) < 1e-5
    gradients = [torch.autograd.grad(o.square().sum(), x)[0] for o in (y, torch.stack([y for y, _ in rows]))]
    assert distance(*gradients) < 1e-5


def test_decoding():
    w, mixer = weights(), create("rwkv7", dim=DIM, head_size=DIM // HEADS)
    mixer.load_rwkv(w)
    x, state, y = torch.randn(1, 24, DIM), None, []
    for piece in x.split([19, 1, 1, 1, 1, 1], 1):
        o, state = mixer(piece, state, return_state=True)
        y.append(o)
    assert distance(torch.cat(y, 1)[0], theirs(w, x[0])[0]) < 1e-5


def test_the_beginning():
    """Initialisation as in training code: decays from 0.995 to 0.55 and an output of zero."""
    mixer = create("rwkv7", dim=128)
    decay = torch.exp(-(-0.5 * torch.ones(())).exp() * mixer.w0.sigmoid())
    assert decay.max() > 0.995 and decay.min() < 0.58
    assert not mixer(torch.randn(1, 5, 128)).any()
    assert scattered(mixer)(torch.randn(1, 5, 128)).any()


def published(model):
    """The weights of ``model`` under the names of RWKV-LM's training code."""
    names = {"r_proj": "receptance", "k_proj": "key", "v_proj": "value", "o_proj": "output", "norm": "ln_x"}
    own = {"emb.weight": model.model.embedding.weight, "head.weight": model.lm_head.weight}
    own |= {f"blocks.0.ln0.{n}": p for n, p in model.model.embedding_norm.named_parameters()}
    own |= {f"ln_out.{n}": p for n, p in model.model.norm.named_parameters()}
    for i, layer in enumerate(model.model.layers):
        part, norm = ("ffn", "ln2") if i % 2 else ("att", "ln1")
        own |= {f"blocks.{i // 2}.{norm}.{n}": p for n, p in layer.mixer_norm.named_parameters()}
        for name, p in layer.mixer.named_parameters():
            first, dot, rest = name.partition(".")
            first = {"time_mix_key": "x_k", "k_proj": "key", "o_proj": "value"}.get(first, first) if i % 2 else names.get(first, first)
            own[f"blocks.{i // 2}.{part}.{first}{dot}{rest}"] = 1 - p if first == "x_k" and i % 2 else p
    return {name: p.detach().clone() for name, p in own.items()}


def test_a_model(tmp_path):
    """Three blocks, with the values of the first one in the others: whole and by steps, against the package's own model."""
    ours = LanguageModel(LMConfig.preset("rwkv7", vocab_size=50, dim=DIM, layers=6, mixer_options={"rwkv7": {"head_size": 32}})).eval()
    scattered(ours, w0=2.0, a0=2.0)
    torch.save(published(ours), tmp_path / "model.pth")
    theirs = package(seven=True).RWKV_x070(str(tmp_path / "model"), "cpu fp32")
    ids, state, y = torch.randint(50, (1, 40)), None, []
    with torch.no_grad():
        wanted, their_state = theirs.forward(ids[0].tolist(), None, full_output=True)
        whole, last = ours(ids, return_state=True)
        for piece in ids.split([36, 1, 1, 1, 1], 1):
            logits, state = ours(piece, state, return_state=True)
            y.append(logits)
    assert distance(whole[0], wanted) < 1e-5
    assert distance(torch.cat(y, 1)[0], wanted) < 1e-5
    for i in range(3):
        assert distance(last.layers[2 * i]["S"][0].mT, their_state[3 * i + 1]) < 1e-5


def test_gradients_of_a_model():
    """Of all parameters in float64, against a loop over tokens written from the equations of the numpy reference."""
    ours = LanguageModel(LMConfig.preset("rwkv7", vocab_size=20, dim=DIM, layers=6, mixer_options={"rwkv7": {"head_size": 32}})).double()
    scattered(ours, 0.2)
    ids = torch.randint(20, (9,))
    logits, wanted = ours(ids[None])[0], torch.stack(list(loop(ours.model, ids))) @ ours.lm_head.weight.T
    assert distance(logits, wanted) < 1e-9
    weight = torch.randn_like(logits)
    found = [torch.autograd.grad((o * weight).sum(), list(ours.parameters())) for o in (logits, wanted)]
    for (name, _), a, b in zip(ours.named_parameters(), *found, strict=True):
        assert distance(a, b) < 1e-9, name
    assert found[0][[n for n, _ in ours.named_parameters()].index("model.layers.4.mixer.v1")].abs().max() > 1e-6


def loop(model, ids):
    """Hidden states [D], token by token: states are matrices [H, V, K]."""
    mixers = [layer.mixer for layer in model.layers]
    last, states = [torch.zeros(DIM, dtype=torch.float64)] * 6, [torch.zeros(HEADS, 32, 32, dtype=torch.float64)] * 6
    for token in ids:
        x, first = model.embedding_norm(model.embedding.weight[token]), None
        for i, m in enumerate(mixers):
            t = model.layers[i].mixer_norm(x)
            shifted = lambda mix, t=t, i=i: t + mix * (last[i] - t)  # noqa: E731
            if i % 2:
                x = x + m.o_proj.weight @ (m.k_proj.weight @ shifted(1 - m.time_mix_key)).relu() ** 2
                last[i] = t
                continue
            r, k, v = (p.weight @ shifted(mix) for p, mix in ((m.r_proj, m.x_r), (m.k_proj, m.x_k), (m.v_proj, m.x_v)))
            w = torch.exp(-torch.sigmoid(m.w0 + torch.tanh(shifted(m.x_w) @ m.w1) @ m.w2) / torch.e**0.5)
            a = torch.sigmoid(m.a0 + shifted(m.x_a) @ m.a1 @ m.a2)
            if first is None:
                first = v
            else:
                v = v + (first - v) * torch.sigmoid(m.v0 + shifted(m.x_v) @ m.v1 @ m.v2)
            kk = (k * m.k_k).view(HEADS, 32, 1)
            kk = kk / kk.norm(dim=1, keepdim=True)
            k = k + k * (a - 1) * m.k_a
            r, w, k, v, a = (s.view(HEADS, 32, 1) for s in (r, w, k, v, a))
            states[i] = states[i] * w.mT - states[i] @ kk @ (kk * a).mT + v @ k.mT
            y = (states[i] @ r)[..., 0]
            y = (y - y.mean(1, keepdim=True)) / (y.var(1, keepdim=True, unbiased=False) + 64e-5).sqrt()
            y = y.flatten() * m.norm.weight + m.norm.bias + ((r * k * m.r_k[..., None]).sum(1, keepdim=True) * v).flatten()
            x = x + m.o_proj.weight @ (y * (torch.sigmoid(shifted(m.x_g) @ m.g1) @ m.g2))
            last[i] = t
        yield model.norm(x)


def test_a_later_layer_alone_is_refused():
    mixer = create("rwkv7", dim=DIM, value_residual=True)
    with pytest.raises(ValueError, match="shared must be the first layer's values"):
        mixer(torch.randn(1, 3, DIM))
