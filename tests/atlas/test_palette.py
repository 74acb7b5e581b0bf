"""The palette: readable on both backgrounds, with tensor colours distinguishable in colour blindness."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from linattn.atlas import page

CSS = Path(page.__file__).with_name("style.css").read_text(encoding="utf-8")
COLOURS = {name: pair for name, *pair in re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", CSS)}
TENSORS = ("q", "k", "v", "state", "decay", "output")
# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB
EYES = {
    "usual": np.eye(3),
    "protanope": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deuteranope": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    "tritanope": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
}


def linear(colour):
    c = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def contrast(a, b):
    high, low = sorted((linear(c) @ (0.2126, 0.7152, 0.0722) for c in (a, b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def lab(rgb):
    xyz = np.clip(rgb, 0, 1) @ np.array([[0.4124, 0.2126, 0.0193], [0.3576, 0.7152, 0.1192], [0.1805, 0.0722, 0.9505]])
    f = np.cbrt(xyz / (0.9505, 1.0, 1.089))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_words_are_readable(scheme):
    for back in ("back", "panel"):
        for name in ("text", "soft", "link", *TENSORS, *(f"s{i}" for i in range(10))):
            assert contrast(COLOURS[name][scheme], COLOURS[back][scheme]) >= 4.5, (name, back)


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_tensors_are_apart(scheme, eye):
    seen = {name: lab(EYES[eye] @ linear(COLOURS[name][scheme])) for name in (*TENSORS, "pos", "neg")}
    for a, b in [*itertools.combinations(TENSORS, 2), ("pos", "neg")]:
        assert np.linalg.norm(seen[a] - seen[b]) > 15, (a, b, np.linalg.norm(seen[a] - seen[b]))
