"""Claims of system pages about their code hold on other inputs, for every mixer."""

import re
from dataclasses import replace

import pytest
import torch

import linattn
from linattn import mixers
from linattn.atlas.algebra import CLOSE, matrices, specification
from linattn.atlas.build import Atlas
from linattn.atlas.families import FAMILY
from linattn.atlas.inspection import PAIRED, inspect_mixer
from linattn.atlas.systems import _page
from linattn.mixers import Mixer
from linattn.mixers.taxonomy import FAMILIES, families
from tests.sweeps import swept

TOKENS, SEED = 15, 7


def made(name):
    torch.manual_seed(SEED)
    mixer = mixers.create(name, dim=64).double().eval()
    return mixer, torch.randn(1, TOKENS, 64, dtype=torch.float64)


def by_definition(mixer, r, steps):
    """The recurrence from ``project`` by the reference, undivided; reads each token's last step."""
    heads = r.q.shape[2]
    outputs, state = [], None
    for t in range(r.q.shape[1]):
        for j in range(steps):
            part = slice(j * heads, (j + 1) * heads) if steps > 1 else slice(None)
            own = {"q": r.q[:, t : t + 1], "k": r.k[:, t : t + 1, part], "v": r.v[:, t : t + 1, part], "scale": r.scale, "bonus": r.bonus}
            if r.decay is not None:
                own["decay"] = r.decay if r.decay.ndim <= 2 else r.decay[:, t : t + 1] if j == 0 else None
            own["beta"] = None if r.beta is None else r.beta[:, t : t + 1, part]
            own["erase"] = r.erase and tuple(e[:, t : t + 1] for e in r.erase)
            o, state = linattn.linear_attention(**own, initial_state=state, return_state=True, backend="reference")
        outputs.append(o)
    return torch.cat(outputs, 1)


def far(a, b):
    return ((a - b).norm() / b.norm()).item() if a.shape == b.shape else float("inf")


def parallel(a, b):
    """Distance of the directions of ``a`` and ``b`` [B, T, H, V], invariant to a factor per head and token."""
    along = (a * b).sum(-1, keepdim=True) * b
    return far(a * b.square().sum(-1, keepdim=True), along)


@pytest.mark.parametrize("name", swept(n for n in mixers.available() if mixers.info(n).kind in PAIRED))
def test_every_claim_about_the_recurrence_and_the_values_is_true(name):
    seen = inspect_mixer(name)
    page = _page(Atlas((name,)), seen, (None, None)).body
    (claim,) = re.findall(r'data-claim="(\w+)"', page)
    has_values = mixers.info(name).cls.project is not Mixer.project
    assert has_values == (claim != "own"), "only a mixer without `project` has its own update rule"
    assert ("not a case of the library" in page) == (claim == "own") and ("not one run of the recurrence" in page) == (claim == "weighed")
    if not has_values:
        assert seen.matrix is None and "no queries, keys and values" in page
        return
    with torch.no_grad():
        mixer, x = made(name)
        r = mixer.recurrence(x, mixer.begin(*mixer.arguments(x)))

        def run(v):
            return mixer.attend(replace(r, v=v), mixer.begin(*mixer.arguments(x)))

        a, b = torch.randn_like(r.v), torch.randn_like(r.v)
        assert far(run(a) + 3 * run(b), run(a + 3 * b)) < CLOSE, "every page says that it is linear in its values"
        assert far(run(r.v.abs()).abs(), run(r.v)) > CLOSE, "the measure can fail"
        if mixer.causal:
            steps = seen.spec.steps if seen.spec else 1
            same = r.v.shape[1] == TOKENS and r.q.shape[2] * steps == r.k.shape[2] if steps > 1 else r.q.shape == r.k.shape
            if claim in ("recurrence", "steps") and same and type(mixer).mix is Mixer.mix:
                wanted = by_definition(mixer, r, steps)
                assert (parallel if r.normalize is not False else far)(run(r.v), wanted) < 1e-8
            assert (specification(mixer, x) is not None) == (claim in ("recurrence", "steps")), "on other tokens, too"


@pytest.mark.parametrize("name", ["deltaproduct", "gated_deltaproduct", "cosformer"])
def test_what_was_once_denied_is_said(name):
    seen = inspect_mixer(name)
    assert seen.spec is not None and seen.matrix is not None and seen.nonlinearity < CLOSE
    assert seen.claim == ("recurrence" if name == "cosformer" else "steps") and seen.spec.steps == (1 if name == "cosformer" else 2)


def test_matrices_times_values_are_what_is_read():
    """Also where a token writes two values per head: one matrix for each."""
    with torch.no_grad():
        for name, values in (("deltaproduct", 2), ("gla", 1)):
            mixer, x = made(name)
            found = matrices(mixer, x)
            r = mixer.recurrence(x, mixer.begin(x))
            assert found.values == values
            cells = found.cells.unflatten(0, (-1, values))  # [H, n, T, T]
            v = r.v[0].unflatten(1, (values, -1))  # [T, n, H, V]
            assert far(torch.einsum("hnij,jnhv->ihv", cells, v)[None], mixer.attend(r, mixer.begin(x))) < CLOSE


def test_every_family_has_its_words_and_few_systems_are_others():
    assert tuple(FAMILY) == FAMILIES
    assert len({f.key for f in FAMILY.values()}) == len(FAMILIES)
    kinds = [families(mixers.info(name))[0] for name in mixers.available()]
    assert "others" not in kinds and max(kinds.count(k) for k in kinds) < len(kinds) / 5


def test_a_mixer_that_leaves_the_recurrence_is_found_out():
    class Louder(mixers.info("gla").cls):
        def attend(self, r, call):
            return super().attend(r, call) * torch.arange(1, 1 + r.v.shape[1])[:, None, None]

    with torch.no_grad():
        assert specification(Louder(64).double(), made("gla")[1]) is None
