"""torchtitan's trainer with our models, if installed (not in the test environment)."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from linattn.data import prepare
from linattn.hf import LinattnForCausalLM, LMConfig

pytest.importorskip("torchtitan")


@pytest.fixture
def tokens(tmp_path):
    lines = [json.dumps({"text": f"def f{i}(x): return x + {i}\n" * (1 + i % 7)}) + "\n" for i in range(400)]
    (tmp_path / "text.jsonl").write_text("".join(lines))
    prepare([tmp_path / "text.jsonl"], tmp_path / "tokens", tokenizer=tokenizer(tmp_path), end="<|end|>")
    return tmp_path / "tokens"


def tokenizer(folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.train([str(folder / "text.jsonl")], trainers.BpeTrainer(vocab_size=300, special_tokens=["<|end|>"], show_progress=False))
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def run(tokens, out, processes, *options, good=True):
    """Standard output of torchtitan."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
        "-m",
        "tests.train.titan_cpu",
    ]
    command += [
        "--module",
        "tests.train.titan_cpu",
        "--config",
        "hybrid",
        "--dump_folder",
        str(out),
        "--training.mixed_precision_param",
        "float32",
    ]
    command += ["--training.seq_len", "32", "--metrics.log_freq", "1", "--lr_scheduler.warmup_steps", "1", "--debug.seed", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "TITAN_DATA": str(tokens)}, timeout=500)
    assert (done.returncode == 0) is good, done.stderr[-3000:]
    return done.stdout + done.stderr


def steps(output):
    """Loss and norm of the gradient by step."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    return {
        int(s): (float(loss), float(norm)) for s, loss, norm in re.findall(r"step: *(\d+) *loss: *([\d.]+) *grad_norm: *([\d.]+)", plain)
    }


@pytest.mark.slow
def test_sharded_processes_train_as_one_and_save_names_of_ours(tokens, tmp_path):
    save = ["--checkpoint.enable", "--checkpoint.last_save_in_hf", "--checkpoint.last_save_model_only"]
    one = steps(run(tokens, tmp_path / "one", 1, "--training.steps", "6", "--training.local_batch_size", "4", *save))
    two = steps(run(tokens, tmp_path / "two", 2, "--training.steps", "6", "--training.local_batch_size", "2"))
    assert one.keys() == two.keys() == set(range(1, 7))
    for step, values in one.items():
        assert two[step] == pytest.approx(values, rel=1e-4)
    assert one[6][0] < one[1][0] - 0.1
    saved = {}
    for file in (tmp_path / "one").glob("checkpoint/step-6/**/*.safetensors"):
        saved |= load_file(file)
    model = LinattnForCausalLM(LMConfig(vocab_size=300, mixer="gated_deltanet, softmax", dim=64, layers=2))
    assert {n: t.shape for n, t in saved.items()} == {n: t.shape for n, t in model.state_dict().items()}
    assert all(torch.isfinite(t).all() for t in saved.values())


@pytest.mark.slow
def test_torchtitans_parallelism_of_layers_is_refused(tokens, tmp_path):
    said = run(tokens, tmp_path / "out", 2, "--parallelism.tensor_parallel_degree", "2", "--training.steps", "1", good=False)
    assert "shard over all processes under torchtitan, without tp: use linattn train" in said
