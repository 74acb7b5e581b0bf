"""The studies of recall, capacity, state tracking and copying, at tiny sizes."""

import math
from dataclasses import replace

import pytest
import torch

from linattn import mixers
from linattn.experiment import runner, workers
from linattn.experiment.study import LeftOut
from linattn.reproduce import STUDIES, capacity, copying, ledger, recall, state_tracking, variants

OURS = {"recall": recall, "capacity": capacity, "state-tracking": state_tracking, "copying": copying}


def _measured(study, run):
    one = workers.measured(study.measure, {**run, "device": "cpu"})
    assert isinstance(one, workers.Finished), one
    return one.result


def _table(study, settings):
    """Execute all runs and those requested later, then build the rows and charts."""
    done = []
    while missing := [run for run in study.runs(settings, done) if run not in [r for r, _ in done]]:
        done += [(run, _measured(study, run)) for run in missing]
    table = study.rows(settings, done)
    keys = {c.key for c in study.all_columns} - {"agrees"}
    assert all(keys <= row.keys() for row in table)
    assert all(cell for row in table for cell in [c.cell(row) for c in study.all_columns])
    return done, table, study.charts(settings, table)


@pytest.mark.parametrize("name", OURS)
def test_settings_name_mixers_that_exist_and_ask_for_what_they_say(name):
    study = ledger.load(name)
    assert name in STUDIES
    for settings in (study.quick, study.full):
        assert settings.seeds >= 3
        assert all(variants.parse(text).label for text in settings.mixers)
        runs = study.runs(settings, [])
        assert {run["mixer"] for run in runs} == set(settings.mixers)
        assert len({runner.key(run) for run in runs}) == len(runs)
        one = study.runs(replace(settings, mixers=("lstm",), seeds=1), [])
        assert {run["mixer"] for run in one} == {"lstm"}
        assert {run["seed"] for run in one} == {0}


@pytest.fixture
def tiny(monkeypatch):
    parts = (recall.Part("multi_query_recall", {"tokens": 8, "pairs": 2, "vocab_size": 16}, 32),)
    changed = recall.Part("forgetting_recall", {"tokens": 12, "pairs": 2, "updates": 1, "vocab_size": 16}, 32)
    tests = {"mqar": {"2 pairs": parts[0]}, "forgetting": {"2 pairs": changed}}
    task = recall.Task((*parts, changed), tests, dims=(32,), learning_rates=(1e-3, 1e-2), epochs=2, batch_size=16, trial=1)
    squeeze = recall.Part("compression", {"tokens": 8}, 32)
    monkeypatch.setitem(recall.TASKS, "tiny", task)
    monkeypatch.setitem(recall.TASKS, "squeeze", recall.Task((squeeze,), {"squeeze": {"test": squeeze}}, (32,), (1e-3,), 1, 16))
    return recall.Settings(("gla", "softmax:window=4"), 2, ("tiny", "squeeze"))


def test_recall_goes_on_with_the_best_learning_rate(tiny):
    first = recall.runs(tiny, [])
    assert len(first) == 2 * 2 + 2 * 2, "of the grid trials, of a single rate all seeds"
    done, table, charts = _table(recall.STUDY, tiny)
    assert [run["seed"] for run, _ in done if not run["trial"] and run["task"] == "tiny"] == [0, 0, 1, 1]
    grid = [(run, result) for run, result in done if run["task"] == "tiny" and run["mixer"] == "gla"]
    best = max((one for one in grid if one[0]["trial"]), key=lambda one: one[1]["accuracy"])[0]["learning_rate"]
    whole = [(run, result) for run, result in grid if not run["trial"]]
    assert [(run["learning_rate"], run["epochs"]) for run, _ in whole] == [(best, 2)] * 2
    assert [(row["task"], row["mixer"]) for row in table] == [
        (task, mixer) for task in ("mqar", "forgetting", "squeeze") for mixer in tiny.mixers
    ]
    row = table[0]
    values = [result["tests"]["mqar"]["2 pairs"] for _, result in whole]
    assert row["accuracy"] == pytest.approx(sum(values) / 2)
    assert row["learning_rate"] == best
    assert row["seeds"] == 2
    assert row["state_bytes"] == grid[0][1]["state_bytes"] > 0
    assert len(charts) == 3
    assert row["paper_says"] and "0.53 at 5k" in row["paper_says"]
    assert [r["paper_says"] for r in table if r["task"] == "forgetting"] == [None, None]
    assert {r["agrees"] for r in table} == {None}, "another vocabulary"


def test_trials_are_not_in_the_table(tiny):
    runs = recall.runs(tiny, [])
    done = [(run, {"accuracy": i / 9, "tests": {"mqar": {"2 pairs": i / 9}}, "state_bytes": 9}) for i, run in enumerate(runs)]
    after = recall.runs(tiny, done)
    assert after[: len(runs) // 2] == runs[: len(runs) // 2]
    assert [run["learning_rate"] for run in after if run["task"] == "tiny" and not run["trial"]] == [1e-2] * 4, "the later was the better"
    assert {row["dim"] for row in recall.rows(replace(tiny, tasks=("tiny",)), [one for one in done if one[0]["trial"]])} == set()
    some = [one for one in done if one[0] != runs[1]]
    assert {run["mixer"] for run in recall.runs(tiny, some) if run["task"] == "tiny" and not run["trial"]} == {"softmax:window=4"}


def test_a_task_can_take_the_rate_of_another(tiny, monkeypatch):
    other = replace(recall.TASKS["tiny"], learning_rates=(), trial=0, rates_of="tiny")
    monkeypatch.setitem(recall.TASKS, "other", other)
    settings = replace(tiny, mixers=("gla",), seeds=1, tasks=("other", "tiny"))
    runs = recall.runs(settings, [])
    assert {run["task"] for run in runs} == {"tiny"}
    done = [(run, {"accuracy": run["learning_rate"]}) for run in runs]
    assert [(r["task"], r["learning_rate"]) for r in recall.runs(settings, done) if not r["trial"]] == [("other", 1e-2), ("tiny", 1e-2)]


def test_figures_of_the_paper_between_those_that_were_read():
    points = ((10, 0.2), (1000, 0.8))
    assert [recall._between(points, n) for n in (10, 100, 1000)] == pytest.approx([0.2, 0.5, 0.8])
    assert recall._between(points, 9) is None is recall._between(points, 1001)
    row = {"mixer": "deltanet", "state_bytes": 4 * 34_000, "accuracy": 0.9}
    assert recall._paper("mqar", "mqar", row)["agrees"] is True
    assert recall._paper("mqar", "mqar", {**row, "accuracy": 0.8})["agrees"] is False
    assert recall._paper("mqar", "mqar", {**row, "mixer": "softmax", "accuracy": 1.0})["agrees"] is True
    assert recall._paper("mqar", "mqar", {**row, "mixer": "h3"})["agrees"] is False
    assert recall._paper("quick", "mqar", row)["agrees"] is None
    assert recall._paper("mqar", "mqar", {**row, "mixer": "softmax:window=16"})["paper_says"].startswith("0.08 at 10k")
    assert recall._paper("mqar", "mqar", {**row, "mixer": "softmax:window=null"})["paper_says"] == "1.00"
    assert recall._paper("mqar", "mqar", {**row, "mixer": "titans_mag:window=16"})["paper_says"] is None, "it keeps more than a window"


def test_recall_of_another_protocol_is_another_run(tiny, monkeypatch):
    before = recall.runs(tiny, [])
    monkeypatch.setitem(recall.TASKS, "tiny", replace(recall.TASKS["tiny"], epochs=3))
    after = recall.runs(tiny, [])
    assert [a == b for a, b in zip(before, after, strict=True)] == [a["task"] != "tiny" for a in after]


@pytest.mark.parametrize("name", recall.TASKS)
def test_every_task_of_recall_can_be_made_and_asked(name):
    task = recall.TASKS[name]
    generator = torch.Generator().manual_seed(0)
    made = [replace(part, count=2).make(generator) for part in (*task.train, *(p for t in task.tests.values() for p in t.values()))]
    assert len({e.vocab_size for e in made}) == 1
    with torch.device("meta"):
        model = recall.build(task, "linear", 32, made[0].vocab_size, 0)
    assert model.language.config.mixer_names == ["base_conv", "linear"]
    assert all((e.labels != -100).any(1).all() for e in made)


def test_state_tracking():
    short = state_tracking.Problem((4, 8), 16, 1e-3)
    settings = state_tracking.Settings(
        ("deltaproduct:conv_width=1", "softmax"), 2, {"parity": short, "S3": short}, 1,
        dim=32, layers=1, batch_size=8, times=(2, 4), tests=8,
    )  # fmt: skip
    done, table, charts = _table(state_tracking.STUDY, settings)
    assert len(done) == 8
    assert [(row["problem"], row["mixer"]) for row in table] == [(p, m) for p in ("parity", "S3") for m in settings.mixers]
    assert [row["chance"] for row in table] == [1 / 2, 1 / 2, 1 / 6, 1 / 6]
    values = [result["accuracy"]["32"] for run, result in done if (run["problem"], run["mixer"]) == ("S3", "softmax")]
    assert table[3]["accuracy"] == pytest.approx(sum(values) / 2)
    assert table[3]["best"] == max(values)
    assert [row["longest"] for row in table] == [32] * 4
    assert [row["paper_says"] for row in table] == ["solved", "not solved"] * 2
    assert [row["agrees"] for row in table] == [False, True] * 2, "two steps teach nothing"
    assert len(charts) == 2


@pytest.mark.parametrize(
    ("problem", "mixer", "said"),
    [
        ("parity", "deltanet:negative_eigenvalues=true", "solved"),
        ("parity", "deltaproduct:negative_eigenvalues=false", None),
        ("parity", "deltanet", "not solved"),
        ("parity", "slstm", "solved"),
        ("S3", "deltanet:negative_eigenvalues=true", "not solved in one layer"),
        ("S3", "deltaproduct", "solved"),
        ("A5", "gated_deltaproduct", "solved"),
        ("S5", "deltaproduct:substeps=3", "not solved in one layer"),
        ("S5", "deltaproduct:substeps=4", "solved"),
        ("S5", "gla", "not solved"),
        ("S5", "slstm", None),
    ],
)
def test_what_the_papers_say_of_state_tracking(problem, mixer, said):
    few, many = (state_tracking._paper(problem, mixer, 1, best) for best in (0.2, 0.95))
    assert few["paper_says"] == many["paper_says"] == said
    assert (few["agrees"], many["agrees"]) == {None: (None, None), "solved": (False, True)}.get(said, (True, False))


def test_only_the_last_places_count():
    examples = state_tracking.examples("S3", 2, 20, torch.Generator().manual_seed(0))
    tail = state_tracking.last(examples, 16)
    assert (tail.labels == -100).sum(1).tolist() == [4, 4]
    assert torch.equal(tail.labels[:, 4:], examples.labels[:, 4:])


def test_copying():
    settings = copying.Settings(
        ("gla", "softmax", "softmax:window=4"), 1, train={"copying": (2, 4), "induction": (8,)},
        test={"copying": (4, 8, 12), "induction": (8, 16, 20_000)}, examples=16, epochs=1, dim=32, batch_size=8,
        learning_rate=1e-3, tests=2,
    )  # fmt: skip
    done, table, charts = _table(copying.STUDY, settings)
    assert len(done) == 6
    found = {(run["task"], run["mixer"]): result for run, result in done}
    assert found["induction", "softmax"]["tests"]["20000"]["whole"] is None, "its cache would not fit"
    assert found["induction", "softmax:window=4"]["tests"]["20000"]["whole"] is not None
    assert [row["task"] for row in table] == ["copying"] * 3 + ["induction"] * 3
    assert [row["twice"] is not None for row in table] == [True] * 6
    assert table[0]["paper_says"] == "no more than the state can hold"
    assert table[1]["paper_says"] == "strings far longer than its size"
    assert [row["agrees"] for row in table] == [None] * 6, "no test beyond twice the length was possible for softmax"
    assert len(charts) == 2


def test_what_the_papers_say_of_induction():
    def row(mixer, whole, tests=(8, 16, 32)):
        run = {"task": "induction", "mixer": mixer, "train": (8,), "test": tests}
        results = {str(n): {"whole": w} for n, w in zip(tests, whole, strict=True)}
        return copying.rows(copying.STUDY.quick, [(run, {"tests": results, "state_bytes": 1})])[0]

    assert row("mamba", (1.0, 1.0, 1.0), (8, 16, 1 << 20))["agrees"] is True
    assert row("mamba", (1.0, 1.0, 1.0))["agrees"] is None, "nobody asked for a million"
    assert row("mamba", (1.0, 1.0, 0.6))["agrees"] is False
    assert row("softmax", (1.0, 0.9, 0.5))["agrees"] is True
    assert row("softmax", (1.0, 1.0, 1.0))["agrees"] is False
    assert row("softmax", (1.0, 0.9, None))["agrees"] is None
    assert row("softmax:window=4", (1.0, 0.9, 0.5))["paper_says"] is None is row("gla", (1.0, 1.0, 1.0))["agrees"]
    assert row("softmax:window=null", (1.0, 0.9, 0.5))["agrees"] is True, "no window is softmax itself"
    assert row("path", (1.0, 1.0, 1.0))["paper_says"] is None, "it has other positions than what was tested there"


@pytest.mark.parametrize(
    ("mixer", "said"),
    [
        ("softmax", "strings far longer than its size"),
        ("softmax:window=null", "strings far longer than its size"),
        ("softmax:window=4", "no more than the state can hold"),
        ("local", "no more than the state can hold"),
        ("topk", None),
    ],
)
def test_what_the_papers_say_of_copying(mixer, said):
    assert copying._paper({"mixer": mixer, "task": "copying"})["paper_says"] == said


@pytest.mark.parametrize("size", [4, 12])
def test_capacity_against_least_squares(size):
    """The delta rule converges to the state that returns all pairs exactly, a sum returns v_i + Σ_j (k_i · k_j) v_j."""
    generator = torch.Generator().manual_seed(0)
    k, v = capacity.pairs(size // 2, size, orthonormal=False, generator=generator)
    exact = torch.linalg.pinv(k) @ v
    delta, additive = capacity.rule("deltanet"), capacity.rule("linear")
    torch.testing.assert_close(capacity.state(delta, k, v, passes=3000), exact, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(k @ capacity.state(additive, k, v), (k @ k.T) @ v * 1.0)
    once = capacity.state(delta, k, v)
    torch.testing.assert_close(k[-1] @ once, v[-1])
    s = torch.zeros(size, size, dtype=torch.float64)
    for key, value in zip(k, v, strict=True):
        s = s + torch.outer(key, value - key @ s)
    torch.testing.assert_close(once, s)


def test_a_decay_returns_the_last_pair_and_less_of_the_others():
    r = capacity.rule("retnet")
    k, v = capacity.pairs(6, 8, orthonormal=True, generator=torch.Generator().manual_seed(0))
    left = (k @ capacity.state(r, k, v) / v)[:, 0]
    slowest = math.exp(r.decay.max().item())
    torch.testing.assert_close(left, slowest ** torch.arange(5, -1, -1, dtype=torch.float64))


@pytest.mark.parametrize("mixer", ["local", "softmax:window=16", "transformer_xl", "s4", "s4d", "rwkv4", "rg_lru", "lstm"])
def test_capacity_is_asked_of_matrices_only(mixer):
    """Caches and sums per channel are not matrices; Mamba has one, with keys shared by its channels."""
    assert capacity.rule(mixer) is None
    assert capacity.rule("mamba") is not None


@pytest.mark.parametrize(("mixer", "grown"), [("performer", 2), ("gaussian", 2), ("efficient_attention", 1)])
def test_decays_that_follow_the_unit_of_the_keys_forget_nothing(mixer, grown):
    """After reading a text twice the state is the sum of two equal states, or their mean, up to the features' epsilon."""
    assert capacity._rule_name(mixer) == "additive"
    torch.manual_seed(0)
    made, text = mixers.create(mixer, dim=64), torch.randn(1, 8, 64)
    once, twice = (made(x, return_state=True)[1]["S"] for x in (text, text.repeat(1, 2, 1)))
    assert (twice - grown * once).norm() < 0.01 * once.norm()


def test_capacity_attains_the_bound_and_never_passes_it():
    settings = capacity.Settings(("linear", "gla", "deltanet", "rwkv7"), 2, size=8, fractions=(0.5, 1.0, 1.125, 2.0), passes=(1, 2000))
    done, table, charts = _table(capacity.STUDY, settings)
    by = {(row["mixer"], row["keys"], row["passes"]): row for row in table}
    assert by["linear", "orthonormal", 1]["exact"] == by["deltanet", "orthonormal", 1]["exact"] == 8
    assert by["linear", "random", 1]["exact"] == 0
    assert by["deltanet", "random", 2000]["exact"] >= 4
    assert by["gla", "orthonormal", 1]["exact"] == 0
    assert by["rwkv7", "random", 1]["rule"] == "decayed delta"
    assert {row["paper_says"] for row in table} == {None}, "linear algebra alone decides what a paper could claim here"
    for _, result in done:
        assert all(e <= 1 for e in result["exact"])
    for row in table:
        assert row["exact"] <= row["bound"] == 8
        for point in row["curve"]:
            assert point["pairs"] <= 8 or point["exact"] < 1, "no state returns all of more than K random pairs"
    assert len(charts) == 4


@pytest.mark.parametrize("mixer", ["softmax", "softmax:window=4", "lstm"])
def test_what_writes_no_pairs_is_left_out_of_capacity(mixer):
    run = capacity.runs(capacity.Settings((mixer,), 1), [])[0]
    with pytest.raises(LeftOut, match="no pairs"):
        capacity.measure(run)


def test_most_ends_at_the_first_share_that_is_too_low():
    assert capacity.most([1, 2, 4, 8], [1.0, 1.0, 0.98, 1.0], 0.99) == 2
    assert capacity.most([1, 2], [0.5, 1.0], 0.99) == 0
