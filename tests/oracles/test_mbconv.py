"""MBConv against timm's, in training; tests/oracles/test_efficientvit.py has it in whole blocks."""

import torch
from torch import nn

from linattn.mixers import create
from tests.oracles.images import compared, shaken, timm


def test_values_and_gradients():
    act, norm = nn.Hardswish, nn.BatchNorm2d
    theirs = timm().MBConv(32, 32, expand_ratio=4, use_bias=(True, True, False), norm_layer=(None, None, norm), act_layer=(act, act, None))
    values, gradients = compared(shaken(theirs), create("mbconv", dim=32).double(), torch.randn(2, 30, 32, dtype=torch.float64), 5, 6)
    assert values < 1e-12 and gradients < 1e-10
