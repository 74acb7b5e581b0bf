"""Evaluation: figures against explicit formulas, or models with known answers."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import linattn
from linattn.cli.main import main
from linattn.data.codec import ByteCodec
from linattn.evaluation import EvaluateOptions, evaluate, measure
from linattn.evaluation.tasks import prompts

TEXT = "The quick brown fox jumps over the lazy dog. Größe zählt nicht.\n" * 12


def language_model(mixer: str, seed: int = 0) -> linattn.LanguageModel:
    torch.manual_seed(seed)
    return linattn.LanguageModel(linattn.models.LMConfig(vocab_size=256, dim=32, layers=2, mixer=mixer)).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models and a text."""
    root = tmp_path_factory.mktemp("models")
    for seed, mixer in enumerate(("softmax", "gla")):
        from linattn.hf import LinattnForCausalLM, LMConfig

        twin = LinattnForCausalLM(LMConfig(vocab_size=256, dim=32, layers=2, mixer=mixer))
        twin.load_state_dict(language_model(mixer, seed).state_dict())
        twin.save_pretrained(root / mixer)
    (root / "text.txt").write_text(TEXT, encoding="utf-8")
    return root


@pytest.mark.parametrize("context", [1000, 64, 50])
def test_bits_per_byte_and_distance_are_those_of_the_formulas(context):
    model, teacher, tokens = language_model("gla").double(), language_model("softmax", 1).double(), list(TEXT.encode())
    found = measure.on_text(model, tokens, len(tokens), EvaluateOptions(context=context), teacher)
    bits, kl, same, ids = 0.0, 0.0, 0, torch.tensor(tokens)
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, context):
            seen, wanted = ids[start : start + context], ids[start + 1 : start + context + 1]
            seen = seen[: len(wanted)]
            mine, theirs = (m(seen[None])[0].log_softmax(-1) for m in (model, teacher))
            bits -= mine.gather(1, wanted[:, None]).sum().item() / math.log(2)
            kl += (theirs.exp() * (theirs - mine)).sum().item()
            same += (mine.argmax(-1) == theirs.argmax(-1)).sum().item()
    count = len(tokens) - 1
    assert found["bits_per_byte"] == pytest.approx(bits / count, rel=1e-9)
    assert found["kl"] == pytest.approx(kl / count, rel=1e-9)
    assert found["top1"] == same / count


def test_who_knows_nothing_needs_eight_bits_a_byte_and_equals_itself():
    model = language_model("gla")
    torch.nn.init.zeros_(model.lm_head.weight)
    found = measure.on_text(model, list(TEXT.encode()), len(TEXT.encode()), EvaluateOptions(context=100), model)
    assert found["bits_per_byte"] == pytest.approx(8, rel=1e-6)
    assert found["kl"] == 0 and found["top1"] == 1


def answered(text: str) -> str:
    """The right continuation, found by reading the prompt."""
    if found := re.search(r"The secret number of (\w+) is$", text):
        return re.search(rf"number of {found[1]} is( \d+)\.", text)[1]
    if found := re.search(r"The value of (\w+) is$", text):
        name = found[1]
        while not name.isdigit():
            name = re.search(rf"\b{name} = (\w+)\.", text)[1]
        return f" {name}"
    said = re.findall(r"Somebody says (\w+)\.", text)
    return f" {max(set(said), key=said.count)}"


class Reader:
    """A model over bytes that answers from the prompt, or always with "x"."""

    device = torch.device("cpu")

    def __init__(self, right: bool) -> None:
        self.right, self.lm_head = right, torch.nn.Linear(256, 256, bias=False)
        self.lm_head.weight.data = torch.eye(256)

    def model(self, ids: torch.Tensor) -> tuple[torch.Tensor, None]:
        text = bytes(ids[0].tolist()).decode()
        start = max(text.rfind(" is") + 3, text.rfind("often is") + 8)
        answer = answered(text[:start]) if self.right else " x" * 9
        following = torch.tensor(list((text[:start] + answer).encode())[1 : ids.shape[1] + 1])
        return F.one_hot(following, 256).float()[None], None


@pytest.mark.parametrize("right", [True, False])
def test_tasks_count_right_answers(right):
    options = EvaluateOptions(lengths=(420, 900), samples=4)
    rows = measure.on_tasks(Reader(right), ByteCodec(), options)
    assert [(r["task"], r["length"]) for r in rows] == [(t, n) for t in ("needle", "variables", "words") for n in (420, 900)]
    assert {r["right"] for r in rows} == {float(right)}


@pytest.mark.parametrize("task", ["needle", "variables", "words"])
def test_prompts_have_the_length_that_is_asked_for(task):
    made = prompts(task, ByteCodec(), 900, 6, 3)
    assert all(900 - 40 < len(p.tokens) + len(p.answer) <= 900 for p in made)
    assert len({tuple(p.tokens) for p in made}) == 6
    assert prompts(task, ByteCodec(), 900, 6, 3) == made != prompts(task, ByteCodec(), 900, 6, 4)
    places = [bytes(p.tokens).index(b"Somebody" if task == "words" else b" = " if task == "variables" else b"secret") for p in made]
    assert len(set(places)) > 1
    with pytest.raises(ValueError, match=r"lengths must be at least \d+ tokens .* but has"):
        prompts("words", ByteCodec(), 64, 1, 0)


def test_state_of_softmax_grows_and_that_of_a_recurrence_does_not():
    tokens = list(TEXT.encode())
    constant, growing = (
        [r["state_bytes"] for r in measure.decoding(language_model(m), tokens, EvaluateOptions(lengths=(64, 640), decode=4))]
        for m in ("gla", "softmax")
    )
    assert constant[0] == constant[1]
    assert growing[1] > 4 * growing[0]
    assert not measure.decoding(language_model("gla"), tokens, EvaluateOptions(decode=0))


def test_report_and_page(folders, tmp_path, capsys):
    out = tmp_path / "report"
    given = ["--text", str(folders / "text.txt"), "--lengths", "420", "--samples", "1", "--decode", "2", "--out", str(out)]
    assert main(["evaluate", str(folders / "gla"), "--teacher", str(folders / "softmax"), *given]) == 0
    heads, teacher, student = (line.split("\t") for line in capsys.readouterr().out.splitlines()[:3])
    assert heads[:6] == ["model", "mixer", "parameters", "bits per byte", "KL", "top-1"]
    assert teacher[0] == "softmax (teacher)" and teacher[4] == "–" and student[:2] == ["gla", "gla"]
    report = json.loads((out / "report.json").read_text())
    assert [m["mixer"] for m in report["models"]] == ["softmax", "gla"]
    assert set(report["models"][1]) >= {"bits_per_byte", "kl", "top1", "tasks", "decoding"} and "kl" not in report["models"][0]
    assert report["models"][1]["kl"] > 0
    page = (out / "report.html").read_text()
    assert page.count("<svg role") >= 5 or page.count("<figure>") == 5
    assert f"{report['models'][1]['bits_per_byte']:.3f}" in page
    shown = re.sub(r"<dl>.*?</dl>|<title>.*?</title>", "", page.partition("<main>")[2].partition("</main>")[0])  # facts and hints are data
    chinese = " ".join(re.findall(r">([^<>]+)<", re.sub(r'<(\w+)[^>]* lang="en"[^>]*>.*?</\1>', "", shown)))
    assert not re.search(r"[a-zA-Z]{3,} [a-z]{2,}|teacher|right|Speed", chinese.replace("gla", "")), chinese
    assert "softmax（教师）" in chinese and "答对，%" in chinese and "420 处的状态" in chinese


@pytest.mark.parametrize(("dtype", "wanted"), [(None, torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_models_are_measured_in_the_dtype_asked_for(folders, monkeypatch, dtype, wanted):
    seen = []
    monkeypatch.setattr(measure, "on_tasks", lambda model, codec, options: seen.append(next(model.parameters()).dtype) or [])
    how = EvaluateOptions(text=(str(folders / "text.txt"),), decode=0, dtype=dtype, device="cpu", teacher=folders / "softmax")
    evaluate([folders / "gla"], how)
    assert seen == [wanted, wanted]
    with pytest.raises(ValueError, match="dtype must be 'bf16' or 'fp32' or None, but came as 'fp16'"):
        EvaluateOptions(dtype="fp16")


def test_refusals(folders, tmp_path, capsys):
    with pytest.raises(ValueError, match="models must be a list"):
        evaluate([])
    with pytest.raises(ValueError, match="tasks must be among needle, variables, words, but have 'nedle'"):
        EvaluateOptions(tasks=("nedle",))
    with pytest.raises(FileNotFoundError, match="does not exist"):
        evaluate([folders / "nothing"])
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["evaluate", str(folders / "gla"), "--out", str(tmp_path)]) == 2
    assert "holds files that are not part of a linattn report" in capsys.readouterr().err
    assert measure.same_tokens(ByteCodec(), ByteCodec())
    assert not measure.same_tokens(ByteCodec(), SimpleNamespace(content="{}"))


def test_a_missing_model_is_found_before_anything_is_measured(folders, monkeypatch):
    monkeypatch.setattr("linattn.evaluation.run._measured", lambda *_: pytest.fail("measured before all models were looked for"))
    with pytest.raises(FileNotFoundError, match="absent does not exist"):
        evaluate([folders / "gla", folders / "absent"])
