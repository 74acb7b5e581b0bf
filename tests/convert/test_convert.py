"""A whole conversion: its folder, its log, its refusals and the command."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import linattn
from linattn.cli.main import main
from linattn.distill import make_plan
from linattn.distill.conversion import convert
from linattn.hf import LinattnForCausalLM, LMConfig
from linattn.models.files import WEIGHTS
from linattn.train import TrainOptions, load_run, train
from tests.convert.models import SMALL, contents, softmax_model

IDS = torch.arange(20).view(1, 20) * 11 % 256


def test_the_result_is_a_model_like_any_other(done):
    model = linattn.load(done.folder)
    assert model.config.mixer == "gated_deltanet*2, softmax"
    assert done.kept == (2,)
    theirs = AutoModelForCausalLM.from_pretrained(done.folder)
    plain, codec = load_run(done.folder)
    with torch.no_grad():
        logits = model(IDS).logits
        assert torch.equal(theirs(IDS).logits, logits)
        assert torch.equal(plain(IDS), logits)
    assert codec.encode("fox") == AutoTokenizer.from_pretrained(done.folder)("fox")["input_ids"] == list(b"fox")
    assert model.generate(IDS, max_new_tokens=3, do_sample=False).shape == (1, 23)


def test_the_log_tells_each_stage(done):
    log = [json.loads(line) for line in (done.folder / "log.jsonl").read_text().splitlines()]
    assert log == done.history
    assert [record["stage"] for record in log] == ["copy", "calibrate", 1, 1, 2, 2, 3]
    assert [record["step"] for record in log] == [0, 0, 2, 4, 6, 8, 10]
    assert [record["tokens"] for record in log] == [0, 0, 128, 256, 384, 512, 640]
    for record in log:
        assert ("output_error" in record) == (record["stage"] in ("copy", "calibrate", 1))
        assert 0 <= record["top1"] <= 1 and record["kl"] >= 0 and record["bits_per_byte"] > 0
    assert [len(record["output_error"]) for record in log[:4]] == [2] * 4
    assert sum(log[3]["output_error"]) < sum(log[0]["output_error"])
    assert done.gap_closed == 1 - log[-1]["kl"] / log[0]["kl"]


def test_every_layer_kept_is_the_teacher(teacher, text, tmp_path):
    options = {**SMALL, "tokens2": 0}
    result = convert(teacher, mixer="softmax", text=[str(text)], out=tmp_path / "out", progress=False, **options)
    with torch.no_grad():
        torch.testing.assert_close(linattn.load(result.folder)(IDS).logits, linattn.load(teacher)(IDS).logits, rtol=0, atol=1e-5)
    assert result.history[-1]["kl"] == pytest.approx(0, abs=1e-6)
    assert result.gap_closed == pytest.approx(1, abs=1e-6) or result.history[0]["kl"] < 1e-6


PLAIN = {**SMALL, "mixer": "gla, softmax", "tokens1": 64, "tokens2": 64, "rate2": 1e-2}


@pytest.fixture(scope="module")
def plain(teacher, text, tmp_path_factory):
    """The student of the options ``PLAIN``."""
    return convert(teacher, text=[str(text)], out=tmp_path_factory.mktemp("plain") / "out", progress=False, **PLAIN).folder


@pytest.mark.parametrize("change", [{"rate2": 1e-5}, {"seed": 1}, {"calibrate": False}, {"rotary": "drop"}, {"dtype": "bf16"}])
def test_every_option_does_something(change, plain, teacher, text, tmp_path):
    result = convert(teacher, text=[str(text)], out=tmp_path / "out", progress=False, **{**PLAIN, **change})
    first, second = linattn.load(plain), linattn.load(result.folder)
    assert not all(torch.allclose(a, b, atol=2e-4) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_a_model_and_a_run_are_teachers(text, tmp_path, teacher):
    options = {**SMALL, "tokens1": 64, "tokens2": 0, "mixer": "gla, softmax", "text": [str(text)], "progress": False}
    model = linattn.load(teacher)
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    by_model = convert(model, out=tmp_path / "a", **options)
    assert all(torch.equal(t, weights[name]) for name, t in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())
    assert contents(by_model.folder) == contents(convert(teacher, out=tmp_path / "b", **options).folder)
    run = TrainOptions(mixer="softmax", dim=32, layers=2, steps=2, context=16, batch_size=2, text=(str(text),), out=tmp_path / "run")
    train(run, progress=False)
    assert convert(tmp_path / "run", out=tmp_path / "c", **options).kept == (1,)
    with pytest.raises(ValueError, match="out must be a folder if the teacher is a model"):
        convert(model, **options)


def test_half_precision_is_trained_in_float32(text, tmp_path):
    model = softmax_model().bfloat16()
    result = convert(model, text=[str(text)], out=tmp_path / "out", progress=False, **{**SMALL, "tokens1": 64, "tokens2": 0})
    assert {p.dtype for p in linattn.load(result.folder).parameters()} == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("mixer", "message"),
    [
        ("gla", "teacher must have softmax attention in every layer, but is made of gla"),
        ("mamba2, gla", "teacher must have softmax attention in every layer, but is made of mamba2, gla"),
        ("softmax, gla", "teacher must have softmax attention in every layer, but layer 1 is gla"),
    ],
)
def test_other_teachers_are_refused(mixer, message, tmp_path, capfd):
    LinattnForCausalLM(LMConfig(dim=32, layers=2, mixer=mixer)).save_pretrained(tmp_path / "teacher")
    assert main(["convert", str(tmp_path / "teacher"), "--out", str(tmp_path / "out")]) == 2
    assert capfd.readouterr().err.splitlines()[-1] == f"linattn: {message}"
    assert not (tmp_path / "out").exists()


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(TypeError, match="teacher must be a folder, a linattn.LanguageModel or its Hugging Face twin, but came as a Linear"):
        convert(torch.nn.Linear(2, 2), out=tmp_path / "out")
    with pytest.raises(OSError, match="does not exist"):
        convert(tmp_path / "nothing", out=tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 4, "mixer": "gla"}, "keep must be at most 3, the layers of the teacher, but came as 4"),
        ({"keep": 1}, "mixer must not name softmax where keep or keep_layers chooses"),
        ({"keep": 1, "keep_layers": (0,)}, "keep and keep_layers exclude each other"),
        ({"rotary": "turn"}, "rotary must be 'keep' or 'drop', but came as 'turn'"),
        ({"dtype": "fp16"}, "dtype must be 'bf16' or 'fp32' or None, but came as 'fp16'"),
        ({"accumulate": 3}, "accumulate must divide batch_size = 4, but came as 3"),
        ({"rate1": 0.0}, "rate1 must be positive and finite, but came as 0.0"),
        ({"tokens1": -1}, "tokens1 must be at least 0, but came as -1"),
        ({"context": 2000}, "the text has .* fewer than the context of 2000|the validation part of the text has"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message, teacher, text, tmp_path):
    with pytest.raises(ValueError, match=message):
        convert(teacher, text=[str(text)], out=tmp_path / "out", **{**SMALL, **options})
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_no_number_ends_the_conversion(teacher, text, tmp_path):
    with pytest.raises(ValueError, match="the loss is NaN or infinite after step . of stage 2: lower its learning rate"):
        convert(teacher, mixer="gla", text=[str(text)], out=tmp_path / "out", progress=False, **{**SMALL, "rate2": 1e30})


def test_the_plan_writes_nothing(teacher, text, tmp_path):
    plan = make_plan(teacher, mixer="gla", text=[str(text)], out=tmp_path / "out", **{**SMALL, "tokens2": 0, "tokens3": 128})
    assert not (tmp_path / "out").exists()
    assert [(stage.steps, stage.tokens) for stage in plan.stages] == [(4, 256), (2, 128)]
    weights = 4 * (plan.teacher + plan.student)
    assert plan.stages[1].nbytes > weights + 3 * 4 * plan.student and plan.stages[1].nbytes > plan.stages[0].nbytes > weights
    assert plan.seconds == sum(stage.steps * stage.seconds for stage in plan.stages) > 0
    assert "stage 1, mixer outputs: 256 tokens in 4 steps" in str(plan)


def test_the_command(teacher, text, tmp_path, capfd):
    words = ["convert", str(teacher), "--mixer", "gla, softmax", "--text", str(text), "--out", str(tmp_path / "out"), "--tokens1", "128"]
    words += ["--tokens2", "128", "--context", "16", "--batch-size", "4", "--no-calibrate"]
    assert main([*words, "--plan"]) == 0
    assert "stage 2, KL of the logits: 128 tokens in 2 steps" in capfd.readouterr().out
    assert not (tmp_path / "out").exists()
    assert main(words) == 0
    told = capfd.readouterr()
    assert f"{tmp_path / 'out'}: KL " in told.out
    assert "stage 1: 1 of 1: kl " in told.err
    assert "calibrate" not in (tmp_path / "out" / "log.jsonl").read_text()
    assert main(words) == 2
    assert "already holds a conversion: continue it with --resume" in capfd.readouterr().err
    assert main(["convert", str(teacher), "--out", str(tmp_path / "out"), "--resume"]) == 0  # finished, with its own options
    assert main(["convert", str(teacher), "--out", str(tmp_path / "out"), "--resume", "--rate1", "0.5"]) == 2
    assert "holds a conversion with other options: rate1 differ" in capfd.readouterr().err


def test_a_folder_with_other_things_is_left_alone(teacher, text, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years")
    with pytest.raises(ValueError, match="already exists and is not a conversion"):
        convert(teacher, text=[str(text)], out=tmp_path / "out", **SMALL)
    assert [path.name for path in (tmp_path / "out").iterdir() if path.suffix] == ["thesis.tex"]


def test_a_finished_conversion_is_not_repeated(done, teacher, text, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(done.folder, out)
    before = (out / WEIGHTS).stat().st_mtime_ns
    options = {"mixer": "gated_deltanet*2, softmax", "text": [str(text)], "tokens3": 128, **SMALL}
    again = convert(teacher, out=out, resume=True, progress=False, **options)
    assert (again.history, again.kept, (out / WEIGHTS).stat().st_mtime_ns) == (done.history, done.kept, before)
