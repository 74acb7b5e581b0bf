"""The files of a run are read by everything that reads transformers models, without conversion."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline

import linattn
from linattn.cli.main import main
from linattn.data.codec import ByteCodec, TokenizerCodec, codec_of
from linattn.train import checkpoint, load_run, train
from tests.programs import Programs
from tests.train.runs import TEXT, options

ROOT = Path(linattn.__file__).parents[1]


def test_the_run_and_each_checkpoint_load_alike(done):
    model, codec = load_run(done.run)
    ids = torch.tensor([codec.encode("the quick")])
    wanted = model(ids)
    for folder in (done.run, checkpoint.newest(done.run)):
        for read in (AutoModelForCausalLM.from_pretrained, linattn.load):
            torch.testing.assert_close(read(folder)(ids).logits, wanted)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer("the quick é").input_ids == codec.encode("the quick é")
        assert isinstance(codec_of(folder, 256), ByteCodec)
        assert AutoModel.from_pretrained(folder)(input_ids=ids).last_hidden_state.shape == (1, 9, 32)


def test_a_pipeline_writes(done):
    writer = pipeline("text-generation", model=str(done.run), device="cpu")
    (found,) = writer("the ", max_new_tokens=4, do_sample=False)
    assert found["generated_text"].startswith("the ")


def test_weights_take_no_second_place_on_the_disk(done):
    newest = checkpoint.newest(done.run)
    assert (done.run / "model.safetensors").samefile(newest / "model.safetensors")
    assert not (done.run / "optimizer.safetensors").exists() and not (done.run / checkpoint.MARK).exists()


def test_a_run_that_was_killed_before_it_showed_its_weights(done, text, tmp_path, monkeypatch):
    run = shutil.copytree(done.run, tmp_path / "run")
    for name in ("model.safetensors", "tokenizer.json"):
        (run / name).unlink()
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("no links")))
    train(options(run, text, resume=True), progress=False)
    assert (run / "model.safetensors").read_bytes() == (run / "checkpoint-6" / "model.safetensors").read_bytes()
    assert (run / "tokenizer.json").is_file()


def test_a_tokenizer_of_ones_own_goes_along_as_it_came(text, tmp_path):
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([TEXT], vocab_size=280, show_progress=False)
    bpe.save(str(tmp_path / "tokenizer.json"))
    content = (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    run = train(options(tmp_path / "run", text, tokenizer=str(tmp_path / "tokenizer.json"), context=4, steps=1), progress=False).run
    assert (run / "tokenizer.json").read_text(encoding="utf-8") == content
    assert isinstance(codec_of(run, 280), TokenizerCodec)
    assert AutoTokenizer.from_pretrained(run)("the lazy dog").input_ids == load_run(run)[1].encode("the lazy dog")


def python(programs: Programs, code: str, folder: Path) -> subprocess.CompletedProcess:
    known = {**os.environ, "PYTHONPATH": str(ROOT), "HF_MODULES_CACHE": str(folder / "modules"), "HF_HUB_OFFLINE": "1"}
    return programs.python("-c", code, env=known, cwd=folder)


HIDDEN = """
class Hidden:
    def find_spec(name, path=None, target=None):
        if name == "linattn":
            raise ModuleNotFoundError("No module named 'linattn'")
sys.meta_path.insert(0, Hidden)
"""
READ = """
import sys, torch
{before}
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({folder!r}, trust_remote_code=True)
print(type(model).__module__, model(torch.tensor([AutoTokenizer.from_pretrained({folder!r})("the").input_ids])).logits.shape)
model.save_pretrained("again")
"""


def test_trusted_code_needs_no_import_and_names_the_package(done, tmp_path, programs):
    found = python(programs, READ.format(before="", folder=str(done.run)), tmp_path)
    assert found.stdout == "linattn.hf.model torch.Size([1, 3, 256])\n", found.stderr
    assert {p.name for p in (tmp_path / "again").glob("*.py")} == {"modeling_linattn.py"}
    missing = python(programs, READ.format(before=HIDDEN, folder=str(done.run)), tmp_path)
    assert missing.returncode and "pip install linattn" in missing.stderr.splitlines()[-1]


def test_attention_by_sdpa_is_accepted_where_layers_attend(done):
    model = AutoModelForCausalLM.from_pretrained(done.run, attn_implementation="sdpa")  # gla, softmax
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(model(ids).logits, load_run(done.run)[0](ids))
    with pytest.raises(ValueError, match="scaled_dot_product_attention"):
        AutoModelForCausalLM.from_config(linattn.LMConfig(dim=32, layers=1, mixer="gla"), attn_implementation="sdpa")


def test_the_command_reads_what_load_reads(done, tmp_path, capsys):
    """A folder of another library, with a tokenizer.json beside it."""
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    MambaForCausalLM(MambaConfig(vocab_size=256, hidden_size=32, num_hidden_layers=1)).save_pretrained(tmp_path / "mamba")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(done.run / name, tmp_path / "mamba")
    how = ["--prompt", "the ", "--max-new-tokens", "3", "--temperature", "0"]
    assert main(["generate", str(tmp_path / "mamba"), *how]) == 0
    first = capsys.readouterr().out
    model = linattn.load(tmp_path / "mamba")
    ids = torch.tensor([list(b"the ")])
    wanted = model.generate(ids, max_new_tokens=3, do_sample=False)[0].tolist()
    assert first == ByteCodec().decode(wanted) + "\n"
    assert main(["generate", str(tmp_path / "mamba"), *how, "--device", "cuda:77"]) == 2
    assert "device 'cuda:77' is not available" in capsys.readouterr().err
