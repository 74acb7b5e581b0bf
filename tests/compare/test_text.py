import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from linattn.compare import measure
from linattn.compare import text as run
from linattn.data import ByteCodec
from linattn.experiment import sizing
from linattn.models import LanguageModel
from linattn.report import CompareOptions, compare
from linattn.train import load_run, train

TEXT = "".join(f"line {i}: the {w} fox jumps over the {w} dog\n" for i, w in enumerate(["lazy", "quick", "brown", "red"] * 60))
TINY = {"steps": 3, "dim": 32, "layers": 1, "contexts": (8, 32), "train_context": 32, "batch_size": 2, "sample_tokens": 8}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def options(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text(TEXT)
    return CompareOptions(mixers=("softmax", "gla"), text=(str(text),), out=tmp_path / "out", **TINY)


def test_a_comparison_from_training_to_page(options, tmp_path):
    report = compare(options)
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == json.loads(json.dumps(report))
    assert report["complete"]
    softmax, gla = report["mixers"]
    assert abs(softmax["parameters"] - gla["parameters"]) <= 0.02 * softmax["parameters"]
    for row in report["mixers"]:
        model, codec = load_run(tmp_path / "out" / row["model"])
        assert sum(p.numel() for p in model.parameters()) == row["parameters"]
        assert model.config.ffn_dim == row["ffn_dim"]
        assert row["training"]["history"][-1]["step"] == 3
        assert [c["context"] for c in row["contexts"]] == [8, 32]
        for c in row["contexts"]:
            _, state = model(torch.zeros(1, c["context"], dtype=torch.int64), return_state=True)
            assert c["state_bytes"] == state.nbytes
            assert min(c["prefill_ms"], c["decode_ms"]) > 0
        assert len(codec.encode(row["sample"])) >= 8
    assert gla["contexts"][0]["state_bytes"] == gla["contexts"][1]["state_bytes"]
    assert [c["bytes"] for c in report["key_value_cache"]] == [c["state_bytes"] for c in softmax["contexts"]]
    assert report["prompt"] in TEXT
    assert (tmp_path / "out" / "report.html").read_text().count("<figure>") == 6


def test_each_mixer_keeps_its_best_learning_rate(options, tmp_path):
    options = replace(options, mixers=("softmax", "softmax:conv_width=4"), learning_rate=(1e-9, 4e-3), seeds=1)
    report = compare(options)
    for row in report["mixers"]:
        training = row["training"]
        assert training["learning_rate"] == 4e-3 and [t["learning_rate"] for t in training["tried"]] == [1e-9, 4e-3]
        assert training["validation_bits_per_byte"] == min(t["validation_bits_per_byte"] for t in training["tried"])
        assert training["validation_bits_per_byte_spread"] is None, "one seed has none"
    assert sorted(p.name for p in (tmp_path / "out" / "models").iterdir()) == ["softmax", "softmax-conv_width-4"]
    assert [row["parts"]["conv_width"] for row in report["mixers"]] == [0, 4]
    html = (tmp_path / "out" / "report.html").read_text()
    assert "Learning rates" in html and "学习率" in html and "softmax conv 4" in html
    assert "--learning-rate 1e-09,0.004" in report["command"] and report["sweep"] is None


def test_every_seed_has_a_model_and_the_report_their_spread(options, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "chosen", lambda mixer: 2e-3)
    options = replace(options, seed=5, learning_rate=("softmax=1e-3",))
    report = compare(options)
    assert [row["training"]["learning_rate"] for row in report["mixers"]] == [1e-3, 2e-3], "given, and the sweep's"
    for row in report["mixers"]:
        training, folder = row["training"], tmp_path / "out" / "models"
        first, second = training["runs"]
        assert [first["seed"], second["seed"]] == [5, 6]
        assert first["validation_bits_per_byte"] != second["validation_bits_per_byte"]
        mean = (first["validation_bits_per_byte"] + second["validation_bits_per_byte"]) / 2
        assert training["validation_bits_per_byte"] == pytest.approx(mean)
        assert training["history"][-1]["validation_bits_per_byte"] == pytest.approx(mean) and training["history"][-1]["step"] == 3
        apart = abs(first["validation_bits_per_byte"] - second["validation_bits_per_byte"])
        assert training["validation_bits_per_byte_spread"] == pytest.approx(apart / 2**0.5)
        seeds = [json.loads((folder / name / "config.json").read_text()) for name in (row["name"], f"{row['name']}-seed-6")]
        assert seeds[0] == seeds[1]
        weights = [load_run(folder / name)[0].model.embedding.weight for name in (row["name"], f"{row['name']}-seed-6")]
        assert not torch.equal(*weights)


def test_the_same_seed_gives_the_same_models_and_replaces_its_own_report(options):
    first = compare(options)
    second = compare(options)
    for a, b in zip(first["mixers"], second["mixers"], strict=True):
        assert a["sample"] == b["sample"]
        assert a["training"]["validation_bits_per_byte"] == b["training"]["validation_bits_per_byte"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mixers": ("softmax", "glaa")}, "did you mean 'gla'"),
        ({"dim": 33}, "33"),
        ({"text": ("missing.txt",)}, "missing.txt"),
        ({"train_context": 5000}, "fewer than the context of 5000"),
    ],
)
def test_what_cannot_be_compared_leaves_nothing_behind(options, change, says):
    options = CompareOptions(**{**vars(options), **change})
    with pytest.raises((ValueError, OSError), match=says):
        compare(options)
    assert not options.out.exists()


def test_unequal_sizes_are_refused_with_the_figures(options, monkeypatch):
    monkeypatch.setattr(sizing, "TOLERANCE", 0.0)
    with pytest.raises(ValueError, match=r"softmax [\d,]+ \(feed-forward width [\d,]+\), gla [\d,]+"):
        compare(options)
    assert not options.out.exists()


def test_what_takes_too_long_is_left_out_and_said(options, monkeypatch):
    monkeypatch.setattr(run, "expected_seconds", lambda measured, context: 31.0 if context == 32 else 0.0)
    report = compare(options)
    for row in report["mixers"]:
        assert [c["context"] for c in row["contexts"]] == [8]
        assert row["left_out"] == [{"context": 32, "reason": "expected to take up to 31 s, above the limit of 20 s for one measurement"}]
    assert (options.out / "report.html").read_text().count("at 32 tokens: expected to take up to 31 s") == 2


def test_an_interrupted_comparison_keeps_what_it_has_and_says_so(options, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "_measure", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compare(options)
    report = json.loads((options.out / "report.json").read_text())
    assert not report["complete"]
    assert [m["name"] for m in report["mixers"]] == ["softmax", "gla"]
    assert not (options.out / "report.html").exists()


def test_all_are_trained_alike(options, monkeypatch):
    asked = []

    def note(one, **how):
        asked.append(one)
        return train(one, **how)

    monkeypatch.setattr(run, "train", note)
    compare(options)
    assert [(a.mixer, a.seed) for a in asked] == [("softmax", 0), ("softmax", 1), ("gla", 0), ("gla", 1)]
    own = {"mixer": "", "ffn_dim": 1, "seed": 0, "learning_rate": 1e-3, "out": None}
    assert {replace(a, **own) == replace(asked[0], **own) for a in asked} == {True}


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        ("half a line\nwhole\n\n  a paragraph\n\n\nanother", ["a paragraph", "another"]),
        ("half a line\n  whole\nline", ["whole\nline"]),
        ("no line at all", ["no line at all"]),
        ("ends\n\n", ["ends\n\n"]),
        ("x\n\n" + "y" * 99, ["y" * run.PROMPT]),
        ("x" + "\n\nword" * 20, ["word"] * run.PROMPTS),
    ],
)
def test_prompts_are_beginnings_of_paragraphs(text, prompts):
    codec = ByteCodec()
    assert run._prompts(SimpleNamespace(validation=np.frombuffer(text.encode(), np.uint8), decode=codec.decode)) == prompts


@pytest.mark.parametrize(
    ("samples", "chosen", "tried"),
    [
        ({"one": ("a b", "a b")}, "one", 1),
        ({"one": ("text", "    "), "two": ("text", "t e")}, "two", 2),
        ({"one": ("text", "   "), "two": ("text", "t   "), "three": ("text", "  ")}, "two", 3),
    ],
)
def test_the_prompt_is_one_that_every_model_continues_with_text(monkeypatch, samples, chosen, tried):
    monkeypatch.setattr(run, "_prompts", lambda text: list(samples))
    monkeypatch.setattr(run, "_continued", lambda options, model, text, prompt: samples[prompt][model])
    models, report = {name: SimpleNamespace(model=i, row={}) for i, name in enumerate("ab")}, {}
    run._sample(None, models, None, report)
    assert report == {"prompt": chosen, "prompts_tried": tried}
    assert tuple(one.row["sample"] for one in models.values()) == samples[chosen]


def test_decode_goes_on_from_the_state_of_the_prefill():
    calls = []

    def model(ids, state=None, *, return_state):
        calls.append((ids.shape[1], None if state is None else state.seen))
        seen = ids.shape[1] + (0 if state is None else state.seen)
        return torch.zeros(1, ids.shape[1], 4), SimpleNamespace(seen=seen, nbytes=100 * seen)

    found = measure.at_context(model, torch.zeros(1, 50, dtype=torch.int64))
    assert found["context"] == 50
    assert found["state_bytes"] == 5000
    assert calls[:4] == [(50, None)] * 4, "a warm-up and three repeats"
    assert calls[4:] == [(1, 50 + i) for i in range(measure.ROUNDS * measure.DECODED + 2)]


@pytest.mark.parametrize("busy", range(measure.ROUNDS))
def test_a_machine_that_is_busy_during_a_round_does_not_slow_decoding(monkeypatch, busy):
    took = [9.0, 9.0] + [0.5 if i // measure.DECODED == busy else 0.1 for i in range(measure.ROUNDS * measure.DECODED)]
    ticks = [0.0]
    for seconds in took:
        ticks += [ticks[-1], ticks[-1] + seconds]
    clock = iter(ticks[1:])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    assert measure._decode(lambda *_, **__: (torch.zeros(1, 1, 4), None), torch.zeros(1, 1), None) == pytest.approx(0.1)


@pytest.mark.parametrize("last", [float("nan"), 2.5])
def test_a_training_that_diverges(options, monkeypatch, last):
    def diverge(asked, **how):
        result = train(asked, **how)
        history = [{**result.history[0], "train_loss": float("inf"), "validation_bits_per_byte": float("nan")}, *result.history]
        return replace(result, history=history, validation_bits_per_byte=last)

    monkeypatch.setattr(run, "train", diverge)
    if last != last:
        with pytest.raises(ValueError, match="the training of softmax diverged: its loss is nan"):
            compare(options)
    else:
        assert compare(options)["mixers"][0]["training"]["history"][0]["validation_bits_per_byte"] is None


def test_expected_time_grows_with_the_square():
    assert measure.expected_seconds([], 256) == 0
    assert measure.expected_seconds([{"context": 100, "prefill_ms": 500.0}], 400) == 8.0


def test_no_memory_is_a_reason(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes")

    with pytest.raises(measure.LeftOut, match="not enough memory"):
        measure.at_context(fail, torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="shape"):
        measure.at_context(lambda *_, **__: (_ for _ in ()).throw(RuntimeError("shape")), torch.zeros(1, 4, dtype=torch.int64))


def test_the_command_line_in_its_own_process(options, programs):
    args = [
        "--mixers",
        "softmax,gla",
        "--text",
        *options.text,
        "--steps",
        "2",
        "--dim",
        "32",
        "--layers",
        "1",
        "--contexts",
        "8",
        "--quick",
    ]
    done = programs.python("-m", "linattn", "compare", *args, "--out", options.out)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == f"report: {options.out / 'report.html'}"
    assert [line.split("\t")[0] for line in lines[:-1]] == ["mixer", "softmax", "gla"]
    assert len({line.count("\t") for line in lines[:-1]}) == 1
    assert "training gla (2 of 2)" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_parameters_are_counted_as_the_model_has_them(options):
    sizes = run.sizes(options, 256)
    for name, size in sizes.items():
        model = LanguageModel(run._config(options, name, 256, size.ffn_dim))
        assert sum(p.numel() for p in model.parameters()) == size.parameters


def test_all_names_every_mixer_of_a_language_model_the_largest_first():
    from linattn import mixers
    from linattn.cli.compare import _every_mixer

    names = _every_mixer()
    assert set(names) == {n for n in mixers.available() if mixers.info(n).causal and mixers.info(n).kind == "sequence"}
    first, last = (sum(p.numel() for p in mixers.create(n, dim=64).parameters()) for n in (names[0], names[-1]))
    assert first > last
