"""sLSTM against the package xlstm: its plain torch cell with the layer around it, and the paper's equations.

The package's layer itself cannot be imported without its kernels, so its convolution, maps and norm are written here with the
names that its ``state_dict`` has.
"""

import math

import torch
import torch.nn.functional as F

from linattn.mixers import create
from tests.oracles import wheels
from tests.oracles.compare import distance

HEADS, DIM = 4, 64
SIZE = DIM // HEADS


def weights():
    shapes = {
        "conv1d.conv.weight": (DIM, 1, 4), "conv1d.conv.bias": (DIM,), "group_norm.weight": (DIM,),
        "fgate.weight": (HEADS, SIZE, SIZE), "igate.weight": (HEADS, SIZE, SIZE), "zgate.weight": (HEADS, SIZE, SIZE),
        "ogate.weight": (HEADS, SIZE, SIZE), "slstm_cell._recurrent_kernel_": (HEADS, 4 * SIZE, SIZE), "slstm_cell._bias_": (4 * DIM,),
    }  # fmt: skip
    return {name: 0.5 * torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def layer(w, x):
    """sLSTMLayer.forward with the cell's backend "vanilla": [B, T, D] -> outputs and the last states [4, B, D]."""
    cell = wheels.module("xlstm==2.0.6", "xlstm/blocks/slstm/src/vanilla/slstm.py").slstm_forward_pointwise
    seen = F.silu(F.conv1d(F.pad(x.mT, (3, 0)), w["conv1d.conv.weight"], w["conv1d.conv.bias"], groups=DIM).mT)
    pairs = (("fgate", seen), ("igate", seen), ("zgate", x), ("ogate", x))  # named i, f, z, o there
    inputs = [torch.einsum("bthd,hod->btho", t.unflatten(-1, (HEADS, -1)), w[f"{name}.weight"]).flatten(-2) for name, t in pairs]
    kernel = w["slstm_cell._recurrent_kernel_"].mT.reshape(1, HEADS, SIZE, 4 * SIZE)
    states, outputs = x.new_zeros(4, len(x), DIM), []
    for wx in torch.cat(inputs, -1).unbind(1):
        ry = states[0].reshape(-1, HEADS, 1, SIZE).matmul(kernel).reshape(-1, HEADS, 4, SIZE).transpose(1, 2).reshape(len(x), -1)
        states, _ = cell(wx, ry, w["slstm_cell._bias_"][None], states, {})
        outputs.append(states[0])
    y = torch.stack(outputs, 1)
    return F.group_norm(y.flatten(0, 1), HEADS, 1 + w["group_norm.weight"], None, 1e-5).view_as(y), states


def pair():
    w = weights()
    ours = create("slstm", dim=DIM, heads=HEADS).double()
    ours.load_xlstm(w)
    return ours, w


def test_values_and_states():
    ours, w = pair()
    x = torch.randn(3, 40, DIM, dtype=torch.float64)
    (y, state), (wanted, states) = ours(x, return_state=True), layer(w, x)
    assert distance(y, wanted) < 1e-12
    for name, theirs in zip("hcnm", states, strict=True):
        assert distance(state[name], theirs) < 1e-12


def test_gradients():
    ours, w = pair()
    x = torch.randn(2, 20, DIM, dtype=torch.float64, requires_grad=True)
    (kernel := w["slstm_cell._recurrent_kernel_"]).requires_grad_()
    wx, wr = torch.autograd.grad(layer(w, x)[0].pow(3).sum(), (x, kernel))
    gx, gr = torch.autograd.grad(ours(x).pow(3).sum(), (x, ours.recurrent_weight))
    assert distance(gx, wx) < 1e-11
    assert distance(gr.transpose(0, 1).flatten(1, 2), wr) < 1e-11


def test_without_a_stabiliser():
    """The paper's equations unchanged, for one head of one number, in Python floats."""
    ours = create("slstm", dim=1, heads=1, conv_width=1).double()
    for p in ours.parameters():
        torch.nn.init.normal_(p)
    x, h, c, n = torch.randn(1, 12, 1, dtype=torch.float64), 0.0, 0.0, 0.0
    (wi, wf, wz, wo), (ri, rf, rz, ro), (bi, bf, bz, bo) = (p.flatten().tolist() for p in (ours.weight, ours.recurrent_weight, ours.bias))
    wanted = []
    for token in x.flatten().tolist():
        raw = ours.conv.weight.item() * token + ours.conv.bias.item()
        seen = raw / (1 + math.exp(-raw))
        i, f = math.exp(wi * seen + ri * h + bi), 1 / (1 + math.exp(-(wf * seen + rf * h + bf)))
        z, o = math.tanh(wz * token + rz * h + bz), 1 / (1 + math.exp(-(wo * token + ro * h + bo)))
        c, n = f * c + i * z, f * n + i
        h = o * c / n
        wanted.append(h)
    ours.norm = torch.nn.Flatten(2)
    assert distance(ours(x).flatten(), torch.tensor(wanted, dtype=torch.float64)) < 1e-12
