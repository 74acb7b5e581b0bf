"""Capacity: interactive writes equal the op's, curves and bound agree with linear algebra."""

import pytest
import torch

from linattn.atlas import capacity
from tests.atlas.browser import needed
from tests.atlas.pages import data


def own(key, keys, values, decay, beta):
    """The three rules, written explicitly."""
    s = torch.zeros(keys.shape[1], values.shape[1], dtype=torch.float64)
    for k, v in zip(keys, values, strict=True):
        s = (decay if key == "decayed" else 1.0) * s
        s = s + torch.outer(k, beta * (v - k @ s) if key == "delta" else v)
    return s


@pytest.mark.parametrize("key", capacity.RULES)
def test_states_are_the_rules(key):
    keys, values = capacity.unit(11, 6, seed=1), capacity.unit(11, 6, seed=2)
    options = {"sum": {}, "decayed": {"decay": 0.8}, "delta": {"beta": 0.7}}[key]
    found = capacity.states(keys[None], values[None], **options)[0]
    torch.testing.assert_close(found, own(key, keys, values, 0.8, 0.7))


def test_the_bound_is_exact(site):
    """n random pairs in a d × d state lose 1 − d / n of their energy at best; values linear in the keys, and d orthogonal pairs,
    nothing.
    """
    for row in data(site, "capacity.html")["exact"]["rows"]:
        assert row["numbers"] == 20 * row["state"] and row["wanted"] == 0.95
        assert row["lost"] == pytest.approx(0.95, abs=0.01)
        assert row["linear"] < 1e-12 and row["sum"] < 1e-12 and row["delta"] < 0.05


def test_no_rule_beats_the_bound_and_the_bound_is_zero_up_to_d(site):
    for size in data(site, "capacity.html")["curves"]["sizes"]:
        best = size["lines"]["best"]
        assert all(error < 1e-9 and right == 1 for times, error, right in best if times <= 1)
        for key in capacity.RULES:
            assert all(a[1] >= b[1] for a, b in zip(size["lines"][key], best, strict=True))


def test_the_story_about_the_rules_is_true():
    """Delta holds rewritten keys best; with keys that never come twice the sum recognises more."""
    shown = capacity.live()
    values = torch.tensor(shown["values"], dtype=torch.float64)
    sets = {s["key"]: (torch.tensor(s["keys"], dtype=torch.float64), s["period"]) for s in shown["keys"]}
    found = {}
    for name, count in (("rewritten", 64), ("random", 32), ("orthogonal", 16)):
        keys, period = sets[name]
        k, v = keys[:count], values[:count]
        kept = slice(max(0, count - period), count)
        for key in capacity.RULES:
            s = own(key, k, v, capacity.DECAY, capacity.BETA)
            found[name, key] = (
                capacity.error(s[None], k[None, kept], v[None, kept]).item(),
                capacity.recognised(s[None], k[None, kept], v[None, kept]).item(),
            )
    assert found["rewritten", "delta"][0] < found["rewritten", "decayed"][0] < found["rewritten", "sum"][0]
    assert found["rewritten", "delta"][1] > found["rewritten", "decayed"][1] > found["rewritten", "sum"][1]
    assert found["random", "sum"][1] > found["random", "delta"][1]
    assert found["orthogonal", "sum"][0] < 1e-5 and found["orthogonal", "delta"][0] < 1e-5 < found["orthogonal", "decayed"][0]


@pytest.mark.parametrize(
    ("name", "count", "decay", "beta"),
    [("random", 1, 0.95, 1.0), ("random", 64, 0.7, 0.4), ("orthogonal", 17, 0.9, 1.0), ("rewritten", 29, 0.5, 1.8)],
)
def test_the_page_writes_and_reads_as_the_op_does(open_page, site, name, count, decay, beta):
    needed()
    reader, shown = open_page("capacity.html"), data(site, "capacity.html")["capacity"]
    reader.page.locator(f"[data-choice=keys] input[value={name}]").check(force=True)
    for slider, value in (("pairs", count), ("decay", decay), ("beta", beta)):
        reader.slide(slider, value)
    (chosen,) = (s for s in shown["keys"] if s["key"] == name)
    keys, values = (torch.tensor(x[:count], dtype=torch.float64) for x in (chosen["keys"], shown["values"]))
    kept = slice(max(0, count - chosen["period"]), count)
    cells = reader.cells("figure[data-set=capacity] .grid")
    assert len(cells) == 3 * (count - kept.start)
    for r, (key, options) in enumerate({"sum": {}, "decayed": {"decay": decay}, "delta": {"beta": beta}}.items()):
        state = capacity.states(keys[None], values[None], **options)[0]
        k, v = keys[kept], values[kept]
        for c, wanted in enumerate(((k @ state) * v).sum(-1).tolist(), kept.start):
            assert cells[r, c] == pytest.approx(wanted, rel=1e-9, abs=1e-12)
        for what, wanted in (
            ("error", capacity.error(state[None], k[None], v[None])),
            ("recognised", capacity.recognised(state[None], k[None], v[None])),
        ):
            output = reader.page.locator(f"output[data-name={key}-{what}]")
            assert float(output.get_attribute("data-value")) == pytest.approx(wanted.item(), rel=1e-9)


def test_curves_show_the_json(open_page, site):
    needed()
    reader, shown = open_page("capacity.html"), data(site, "capacity.html")["curves"]
    for i, size in enumerate(shown["sizes"]):
        reader.slide("size", i)
        for at, measure in ((1, "error"), (2, "recognised")):
            reader.page.locator(f"[data-choice=measure] input[value={measure}]").check(force=True)
            for key, line in size["lines"].items():
                found = reader.page.locator(f"td[data-name={key}]").evaluate_all("ns => ns.map(n => +n.dataset.value)")
                assert found == [point[at] for point in line]
