"""lm-eval runs saved models through its own ``hf`` class, without a network: its answers and likelihoods are those of the uncached forward.

It has about fifty dependencies and is not installed for the tests: ``pip install "lm_eval[hf,ruler]==0.4.13"`` runs this file.
"""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import linattn
from linattn.data.codec import ByteCodec
from linattn.hf.tokenizer import tokenizer_of

ROOT = Path(__file__).parents[2]
LACKING = [name for name in ("lm_eval", "wonderwords") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(LACKING), reason=f'{", ".join(LACKING)} not installed: pip install "lm_eval[hf,ruler]==0.4.13"')
LENGTH, TEXTS = 512, 2  # RULER does not terminate if its own words exceed the length


@pytest.fixture(scope="module", autouse=True)
def _offline():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        yield


@pytest.fixture(scope="module", params=["gated_deltanet, softmax"])
def folder(request, tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    config = linattn.LMConfig(vocab_size=256, dim=32, layers=2, mixer=request.param)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(30)  # away from answers that are one letter, and from ties
    model.save_pretrained(path)
    tokenizer_of(ByteCodec()).save_pretrained(path)
    return path


def test_a_task_of_ruler(folder):
    from lm_eval import simple_evaluate

    how = {"pretrained": str(folder), "device": "cpu", "dtype": "float32"}
    told = {"pretrained": str(folder), "max_seq_lengths": [LENGTH]}
    results = simple_evaluate("hf", model_args=how, tasks=["ruler_fwe"], limit=TEXTS, batch_size=2, metadata=told, bootstrap_iters=0)
    assert 0 <= results["results"]["ruler_fwe"][f"{LENGTH},none"] <= 1
    model, samples = AutoModelForCausalLM.from_pretrained(folder).eval(), results["samples"]["ruler_fwe"]
    assert len(samples) == TEXTS
    for sample in samples:
        prompt, how = sample["arguments"][0]
        ids = torch.tensor([ByteCodec().encode(prompt)])
        with torch.no_grad():
            for _ in range(how["max_gen_toks"]):
                ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
                if ids[0, -1] == 0:
                    break
        wanted = ByteCodec().decode(ids[0, len(prompt.encode()) :].tolist()).split("\0")[0]
        assert sample["resps"][0][0] == wanted
        assert len(wanted) > 3


def test_likelihoods(folder):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    pairs = [("the state", " fades"), ("a", " longer continuation of it"), ("nothing", " is lost")]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    got = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=3).loglikelihood(requests, disable_tqdm=True)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for (context, rest), (likelihood, greedy) in zip(pairs, got, strict=True):
        ids = torch.tensor([ByteCodec().encode(context + rest)])
        with torch.no_grad():
            logits = model(ids).logits[0, len(context) - 1 : -1].log_softmax(-1)
        each = logits.gather(1, ids[0, len(context) :, None])
        assert likelihood == pytest.approx(each.sum().item(), rel=1e-5)
        assert greedy is bool((logits.argmax(-1) == ids[0, len(context) :]).all())


def test_the_example(folder, tmp_path):
    for name in ("config.json", "model.safetensors"):  # as in a run: tokens are bytes
        shutil.copy(folder / name, tmp_path)
    command = [sys.executable, ROOT / "examples/evaluate.py", tmp_path, "--tasks", "ruler_fwe", "--length", LENGTH, "--limit", 1]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "|ruler_fwe|" in done.stdout.replace(" ", "") and f"|{LENGTH}|" in done.stdout.replace(" ", "")
