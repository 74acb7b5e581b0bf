"""Tasks of lm-eval: likelihoods and answers against whole logits, and a task with data on disk.

lm-eval is not installed for the tests: ``pip install "lm_eval[hf]==0.4.13"`` runs the last ones.
"""

import importlib.util
import json
import sys

import pytest
import torch

import linattn
from linattn.cli.main import main
from linattn.data.codec import ByteCodec
from linattn.evaluation import EvaluateOptions, evaluate, harness

PAIRS = [("the state", " fades"), ("a", " longer continuation of it"), ("nothing at all, or nearly", " is lost"), ("no rest", "")]
NEEDS_LM_EVAL = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    lm = linattn.LanguageModel(linattn.models.LMConfig(vocab_size=256, dim=32, layers=2, mixer="gated_deltanet, softmax")).eval()
    with torch.no_grad():
        lm.lm_head.weight.mul_(30)  # away from ties
    return lm


def by_hand(model, context: list[int], rest: list[int]) -> tuple[float, bool]:
    with torch.no_grad():
        logits = model(torch.tensor([context + rest]))[0, len(context) - 1 : -1].log_softmax(-1)
    return sum(logits[i, token].item() for i, token in enumerate(rest)), logits.argmax(-1).tolist() == rest


def greedy(model, prompt: str, count: int) -> bytes:
    ids = torch.tensor([list(prompt.encode())])
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    return bytes(ids[0, len(prompt.encode()) :].tolist())


@pytest.mark.parametrize("batch", [1 << 14, 40, 1])
def test_likelihoods_are_those_of_each_pair_alone(model, monkeypatch, batch):
    monkeypatch.setattr(harness, "_BATCH", batch)
    likely = greedy(model, "the state", 3)
    pairs = [(list(a.encode()), list(b.encode())) for a, b in PAIRS] + [(list(b"the state"), list(likely))]
    for (context, rest), (likelihood, best) in zip(pairs, harness.likelihoods(model, pairs), strict=True):
        wanted, same = by_hand(model, context, rest)
        assert likelihood == pytest.approx(wanted, rel=1e-5)
        assert best is same
    assert [best for _, best in harness.likelihoods(model, pairs)] == [False, False, False, True, True]


def test_answers_are_greedy_and_end_before_their_stop(model):
    prompts = ["once", "a longer prompt"]
    whole = [greedy(model, prompt, 12).decode(errors="replace") for prompt in prompts]
    stop = whole[1][4:6]
    how = {"until": [stop, ""], "max_gen_toks": 12}
    found = harness.answers(model, ByteCodec(), [(prompts[0], {"until": [], "max_gen_toks": 12}), (prompts[1], how)])
    assert found == [whole[0], whole[1].split(stop)[0]]


def test_a_missing_package_is_named_before_anything_is_loaded(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["evaluate", "nothing", "--lm-eval", "piqa"]) == 2
    assert "lm_eval is not installed; this command needs it: pip install lm_eval" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError, match=r"EvaluateOptions.lm_eval needs it: pip install lm_eval"):
        evaluate(["nothing"], EvaluateOptions(lm_eval=("piqa",)))
    with pytest.raises(ValueError, match="lm_eval_tasks must be a folder, but .* is not one"):
        EvaluateOptions(lm_eval_tasks=tmp_path / "none")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with two tasks, their documents, and a saved model."""
    folder = tmp_path_factory.mktemp("tasks")
    documents = [{"text": text, "choices": ["no", "yes indeed"], "right": i % 2} for i, text in enumerate(("one", "two", "three", "four"))]
    (folder / "documents.jsonl").write_text("".join(json.dumps(d) + "\n" for d in documents))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "documents.jsonl")}}, "test_split": "test"}
    choice = {
        "task": "choice", "output_type": "multiple_choice", "doc_to_text": "{{text}}: ", "doc_to_choice": "choices",
        "doc_to_target": "right", "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    rolling = {
        "task": "rolling", "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}],
    }  # fmt: skip
    for task in (choice, rolling):
        (folder / f"{task['task']}.yaml").write_text(json.dumps(data | task))  # JSON is YAML
    return folder, documents


@NEEDS_LM_EVAL
def test_tasks_on_disk(model, tasks, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    folder, documents = tasks
    options = EvaluateOptions(lm_eval=("choice", "rolling"), lm_eval_tasks=folder)
    found = {(row["task"], row["metric"]): row for row in harness.on_harness(model, ByteCodec(), options)}
    right, nats, count = 0, 0.0, 0
    for document in documents:
        context = list(f"{document['text']}:".encode())  # lm-eval moves the space to the continuation
        each = [by_hand(model, context, list(f" {choice}".encode()))[0] for choice in document["choices"]]
        right += each.index(max(each)) == document["right"]
        nats -= by_hand(model, [0], list(document["text"].encode()))[0]
        count += len(document["text"])
    assert found["choice", "acc"] == {"task": "choice", "metric": "acc", "value": right / 4, "samples": 4}
    assert found["rolling", "bits_per_byte"]["value"] == pytest.approx(nats / count / torch.log(torch.tensor(2.0)).item(), rel=1e-5)
    with pytest.raises(ValueError, match="lm_eval must name tasks in .*, but has 'chioce'"):
        harness.on_harness(model, ByteCodec(), EvaluateOptions(lm_eval=("chioce",), lm_eval_tasks=folder))


@NEEDS_LM_EVAL
def test_they_stand_in_the_table(model, tasks, tmp_path, monkeypatch, capsys):
    from linattn.hf import LinattnForCausalLM, LMConfig

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    twin = LinattnForCausalLM(LMConfig(vocab_size=256, dim=32, layers=2, mixer="gated_deltanet, softmax"))
    twin.load_state_dict(model.state_dict())
    twin.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("some text\n" * 50)
    given = ["--text", str(tmp_path / "text.txt"), "--tasks", "", "--decode", "0", "--out", str(tmp_path / "report")]
    given += ["--lm-eval", "choice", "--lm-eval-tasks", str(tasks[0]), "--lm-eval-limit", "3"]
    assert main(["evaluate", str(tmp_path / "model"), *given]) == 0
    table = [line.split("\t") for line in capsys.readouterr().out.splitlines() if "\t" in line]
    (row,) = json.loads((tmp_path / "report" / "report.json").read_text())["models"][0]["lm_eval"]
    assert table[0][-1] == "choice acc" and float(table[1][-1]) == pytest.approx(row["value"], rel=1e-2)
    assert row["samples"] == 3
    assert "choice acc" in (tmp_path / "report" / "report.html").read_text()
