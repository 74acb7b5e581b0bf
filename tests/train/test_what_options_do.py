"""Effect of each option of a training."""

import json
import math
from dataclasses import replace
from functools import wraps
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from linattn.cli.main import main
from linattn.data import prepare
from linattn.data.packed import PackedTokens
from linattn.hf import LinattnForCausalLM, LMConfig
from linattn.models import loss
from linattn.models.block import Block
from linattn.models.config import NORMS
from linattn.models.loss import TokenLoss
from linattn.train import TrainOptions, checkpoint, load_run, saved_options, setup, sharded, train, training
from linattn.train.file import read_options
from linattn.train.optimizers import MuonAdamW, decayed, hidden_matrices
from linattn.train.options import CHOICES
from tests.train.runs import TEXT, contents, edited, options, rates

SHORT = {"steps": 3, "save_every": None, "eval_every": 1, "layers": 1}


def weights(result):
    return load_file(checkpoint.newest(result.run) / "model.safetensors")


def distance(one, other):
    """Relative distance of all weights."""
    total = sum(t.double().norm() ** 2 for t in one.values()) ** 0.5
    return float(sum((one[name].double() - other[name].double()).norm() ** 2 for name in one) ** 0.5 / total)


@pytest.fixture(scope="module")
def short(text, tmp_path_factory):
    """A run of four sequences a step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
        return train(options(tmp_path_factory.mktemp("runs") / "short", text, batch_size=4, **SHORT), progress=False)


def changed(text, tmp_path, **given):
    return train(options(tmp_path / "run", text, **{"batch_size": 4, **SHORT, **given}), progress=False)


def test_two_passes_of_half_a_batch_are_one_of_a_whole(short, text, tmp_path):
    result = changed(text, tmp_path, batch_size=2, accumulate=2)
    assert distance(weights(result), weights(short)) < 1e-4  # the order of sums in float32
    assert [r["tokens"] for r in result.history] == [r["tokens"] for r in short.history]
    alone = changed(text, tmp_path / "alone", batch_size=2)
    assert distance(weights(alone), weights(short)) > 1e-2


def test_bfloat16_products_and_float32_weights(short, text, tmp_path):
    seen = []
    forward = torch.nn.functional.linear
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", lambda *a, **k: seen.append((out := forward(*a, **k)).dtype) or out)
        result = changed(text, tmp_path, dtype="bf16")
    assert set(seen) == {torch.bfloat16}
    found = weights(result)
    assert {t.dtype for t in found.values()} == {torch.float32}
    assert 0 < distance(found, weights(short)) < 0.1
    assert saved_options(short.run).dtype == "fp32"  # settled on a machine without a GPU
    with pytest.raises(ValueError, match="dtype 'bf16' there, 'fp32' here"):
        train(replace(saved_options(result.run), resume=True, dtype="fp32"), progress=False)


def test_recomputed_activations_are_the_same(short, text, tmp_path, monkeypatch):
    calls, forward = [], Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, *a, **k: calls.append(torch.is_grad_enabled()) or forward(self, *a, **k))
    result = changed(text, tmp_path, checkpoint_activations=True)
    assert sum(calls) == 2 * 3, "each block twice a step"
    assert contents(result.run / "checkpoint-3") == contents(short.run / "checkpoint-3")


def test_compile_compiles_the_blocks_and_the_chunks_of_the_loss(short, text, tmp_path, monkeypatch):
    """All blocks of one mixer share one graph; gradients equal the eager model's."""
    asked, through = [], torch.compile

    def watched(function, **how):
        asked.append((function.__name__, how))
        return through(function, backend="aot_eager", **how)

    monkeypatch.setattr(torch, "compile", watched)
    torch._dynamo.reset()
    loss._compiled.cache_clear()
    torch._dynamo.utils.counters.clear()
    result = changed(text, tmp_path, compile=True, loss_chunk=32)
    assert asked == [("_call_impl", {"dynamic": False})] + [("_loss_and_gradient", {"dynamic": False})]
    assert not torch._dynamo.utils.counters["graph_break"]
    assert 0 < distance(weights(result), weights(short)) < 1e-3
    loss._compiled.cache_clear()


def test_packed_batches_of_a_compiled_model_share_one_graph(tmp_path, monkeypatch):
    """Otherwise each number of documents would be compiled."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": TEXT[: 20 + 7 * i]}) + "\n" for i in range(90)))
    prepare([tmp_path / "a.jsonl"], tmp_path / "data", validation=0.2)
    counts, collated = set(), training.collate

    def counting(rows, multiple):
        counts.add(sum(len(row["starts"]) for row in rows))
        return collated(rows, multiple)

    monkeypatch.setattr(training, "collate", counting)
    through = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **how: through(function, backend="aot_eager", **how))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    asked = {"data": tmp_path / "data", "compile": True, "mixer": "gla", "context": 128, "batch_size": 2, "dim": 32, "layers": 2}
    train(TrainOptions(**asked, steps=8, eval_every=8, out=tmp_path / "run"), progress=False)
    assert len(counts) > 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3, "training, validation, and its last batch"


def test_documents_are_joined_on_demand(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": TEXT[: 20 + 7 * i]}) + "\n" for i in range(90)))
    prepare([tmp_path / "a.jsonl"], tmp_path / "data", validation=0.2)
    asked = {
        "data": tmp_path / "data",
        "mixer": "gla",
        "context": 256,
        "batch_size": 2,
        "dim": 32,
        "layers": 1,
        "steps": 2,
        "eval_every": 1,
    }
    apart = train(TrainOptions(**asked, out=tmp_path / "apart"), progress=False)
    joined = train(TrainOptions(**asked, out=tmp_path / "joined", join_documents=True), progress=False)
    assert distance(weights(apart), weights(joined)) > 1e-4
    few = train(TrainOptions(**asked, out=tmp_path / "few", join_documents=True, eval_tokens=256), progress=False)
    assert distance(weights(few), weights(joined)) == 0
    assert few.validation_bits_per_byte != joined.validation_bits_per_byte
    with pytest.raises(ValueError, match="join_documents True there, False here"):
        train(TrainOptions(**{**asked, "steps": 3}, out=tmp_path / "joined", resume=True), progress=False)
    edited(tmp_path / "apart" / "run.json", lambda run: run["same"].pop("join_documents"))  # begun before the option existed
    train(TrainOptions(**{**asked, "steps": 3}, out=tmp_path / "apart", resume=True, warmup=0), progress=False)
    with pytest.raises(ValueError, match="join_documents needs data"):
        TrainOptions(join_documents=True)


def test_the_schedules(text, tmp_path):
    found = {}
    for name in ("cosine", "linear", "wsd", "constant"):
        asked = {"schedule": name, "warmup": 2, "steps": 10, "dim": 32, "learning_rate": 1.0, "max_grad_norm": 1e-12}
        found[name] = rates(changed(text, tmp_path / name, **asked).run / "checkpoint-10")
    for each in found.values():
        assert each[:3] == [0.0, 0.5, 1.0]
    assert found["constant"][2:] == [1.0] * 8
    assert found["linear"][2:] == pytest.approx([1 - i / 8 for i in range(8)])
    assert found["cosine"][2:] == pytest.approx([0.5 + 0.5 * math.cos(math.pi * i / 8) for i in range(8)])
    assert found["wsd"][2:] == pytest.approx([1.0] * 7 + [0.5])


def test_a_clipped_gradient_moves_little(text, tmp_path):
    torch.manual_seed(0)
    start = LinattnForCausalLM(LMConfig(vocab_size=256, dim=32, layers=1, mixer="gla, softmax")).state_dict()
    free, clipped = (weights(changed(text, tmp_path / str(g), max_grad_norm=g, weight_decay=0.0)) for g in (0.0, 1e-12))
    assert distance(clipped, start) < 0.1 * distance(free, start)


def test_the_z_loss_is_in_the_loss(short, text, tmp_path):
    torch.manual_seed(0)
    model = LinattnForCausalLM(LMConfig(vocab_size=256, dim=32, layers=1, mixer="gla, softmax"))
    from linattn.data import corpus

    rows = PackedTokens(corpus((str(text),)).train, 16, seed=0, samples=4)
    logits = model(torch.stack([rows[i]["input_ids"] for i in range(4)])).logits[:, :-1]
    result = changed(text, tmp_path, z_loss=0.25, steps=1)
    added = result.history[0]["train_loss"] - short.history[0]["train_loss"]
    assert added == pytest.approx(0.25 * (logits.logsumexp(-1) ** 2).mean().item(), rel=1e-4)
    kept = load_run(result.run)[0]
    validation = result.history[0]["validation_bits_per_byte"]
    other = changed(text, tmp_path / "again", steps=1, loss_chunk=5)
    assert sum(p.numel() for p in kept.parameters()) == other.parameters
    assert validation == pytest.approx(other.history[0]["validation_bits_per_byte"], rel=1e-2), "validation has no z-loss"


def test_chunks_of_the_loss_change_rounding_alone(short, text, tmp_path, monkeypatch):
    seen, call = [], TokenLoss.__call__
    monkeypatch.setattr(TokenLoss, "__call__", lambda self, *a: seen.append(self.chunk) or call(self, *a))
    assert distance(weights(changed(text, tmp_path, loss_chunk=5)), weights(short)) < 1e-4
    assert set(seen) == {5}


def test_logits_that_would_be_large_are_cut():
    asked = TrainOptions(batch_size=8, context=4096)
    assert setup.token_loss(asked, 32000).chunk == 2048
    assert setup.token_loss(asked, 256) is None
    assert setup.token_loss(replace(asked, z_loss=0.1), 256).chunk == 8 * 4096


def test_heads_norms_and_options_of_mixers(text, tmp_path):
    words = "--steps 1 --dim 32 --layers 2 --context 16 --batch-size 2 --heads 2 --mixer-option softmax.heads=4".split()
    out = tmp_path / "run"
    words += ["--mixer", "gla, softmax", "--text", str(text), "--out", str(out), "--ffn", "switch", "--ffn-option", "switch.count=3"]
    assert main(["train", *words, "--ffn-dim", "40", "--norm", "zero_centered_rms"]) == 0
    config = load_run(out)[0].config
    assert config.mixer_options == {"gla": {"heads": 2}, "softmax": {"heads": 4}}
    assert (config.ffn_options, config.ffn_dim, config.norm) == ({"switch": {"count": 3}}, 40, "zero_centered_rms")
    assert CHOICES["norm"] == NORMS  # duplicated, because the options import no model


def test_wrong_options_are_one_line(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(setup, "find_spec", lambda _: None)
    for words, says in [
        (
            ["--mixer-option", "gla.heads"],
            "--mixer-option must have the form NAME.OPTION=VALUE, such as gla.heads=8, but came as 'gla.heads'",
        ),
        (["--mixer-option", "gla.head=2"], "gla has no option 'head'"),
        (["--mixer", "lstm", "--heads", "2"], "heads must be omitted for lstm"),
        (["--dtype", "fp16"], "dtype must be 'bf16' or 'fp32', but came as 'fp16'"),
        (["--optimizer", "sgd"], "optimizer must be 'adamw' or 'muon', but came as 'sgd'"),
        (["--norm", "batch"], "norm must be 'rms' or 'zero_centered_rms' or 'layer', but came as 'batch'"),
        (["--schedule", "step"], "schedule must be 'cosine' or 'wsd' or 'linear' or 'constant', but came as 'step'"),
        (["--device", "tpu9"], "device must be a torch.device"),
        (["--device", "cuda:99"], "device 'cuda:99' is not available"),
        (["--report-to", "email"], "report_to must be of 'tensorboard' or 'wandb', but has 'email'"),
        (["--report-to", "wandb"], "report_to needs the package wandb: pip install wandb"),
        (["--z-loss", "-1"], "z_loss must be at least 0"),
        (["--layers", str(10**12), "--context", "16"], "TB of memory, but there are"),
        (["--config", "nowhere.toml"], "No such file or directory: nowhere.toml"),
    ]:
        assert main(["train", "--text", str(text), "--out", str(tmp_path / "run"), *words]) == 2
        err = capsys.readouterr().err
        assert says in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["options.toml", "options.yaml"])
def test_a_file_of_options(name, text, tmp_path):
    lines = {"mixer": "gla", "steps": 3, "batch-size": 5, "learning_rate": 0.01, "text": str(text), "compile": False, "out": "x"}
    toml = "".join(f"{k} = {json.dumps(v)}\n" for k, v in lines.items()) + "[mixer_options.gla]\nheads = 2\n"
    yaml = "".join(f"{k}: {json.dumps(v)}\n" for k, v in lines.items()) + "mixer_options: {gla: {heads: 2}}\n"
    (tmp_path / name).write_text(toml if name.endswith("toml") else yaml)
    found = TrainOptions(**read_options(tmp_path / name))
    assert (found.mixer, found.steps, found.batch_size, found.learning_rate, found.text) == ("gla", 3, 5, 0.01, (str(text),))
    assert found.mixer_options == {"gla": {"heads": 2}}
    words = ["--steps", "1", "--out", str(tmp_path / "run"), "--dim", "32", "--layers", "1", "--context", "16"]
    assert main(["train", "--config", str(tmp_path / name), *words]) == 0
    begun = saved_options(tmp_path / "run")
    assert (begun.steps, begun.batch_size) == (1, 5), "the command line precedes"


@pytest.mark.parametrize("written", ["1e-3", "1E-3", "+1.e-03", "10.0e-4", ".1e-2", "0.001"])
def test_powers_of_ten_are_numbers_in_yaml_too(written, tmp_path):
    (tmp_path / "a.yaml").write_text(f"learning_rate: {written}\nsteps: 10\nout: '1e-3'\ntext: [1e-3.txt]\n")
    found = read_options(tmp_path / "a.yaml")
    assert found == {"learning_rate": 0.001, "steps": 10, "out": Path("1e-3"), "text": ("1e-3.txt",)}
    assert isinstance(found["steps"], int)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.toml", "stepz = 3", "there is no option 'stepz'; did you mean 'steps'?"),
        ("a.toml", "steps = ", "is damaged"),
        ("a.yaml", "- steps", "must hold names and values of options, but holds list"),
        ("a.yaml", "!!python/object/apply:os.system ['true']", "is damaged"),
        ("a.json", "{}", "must end in .toml, .yaml or .yml"),
        ("a.toml", 'steps = "many"', "steps must be an integer, but came as 'many'"),
    ],
)
def test_a_wrong_file_is_one_line(name, content, says, tmp_path, capsys):
    (tmp_path / name).write_text(content)
    assert main(["train", "--config", str(tmp_path / name)]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def hybrid():
    torch.manual_seed(0)
    return LinattnForCausalLM(LMConfig(vocab_size=50, dim=32, layers=4, mixer="mamba, gated_deltanet, rwkv6, softmax"))


def test_weight_decay_spares_norms_biases_and_time_constants():
    model = hybrid()
    pulled = set(decayed(model))
    spared = {name.removeprefix("model.") for name, _ in model.named_parameters() if name not in pulled}
    assert {"layers.0.mixer.A_log", "layers.0.mixer.dt_bias", "layers.1.mixer.A_log", "layers.2.mixer.time_faaaa", "norm.weight"} <= spared
    assert "layers.0.mixer_norm.weight" in spared
    assert {"model.embedding.weight", "lm_head.weight", "model.layers.1.mixer.conv.weight", "model.layers.3.ffn.down_proj.weight"} <= pulled
    assert not [name for name in pulled if model.get_parameter(name).ndim < 2]


def test_weight_decay_is_that_of_the_option(text, tmp_path):
    seen, named_state = [], sharded.named_state
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded, "named_state", lambda model, optimizer: seen.append(optimizer) or named_state(model, optimizer))
        changed(text, tmp_path, weight_decay=0.3, steps=1)
    assert [group["weight_decay"] for group in seen[-1].param_groups] == [0.3, 0.0]


def test_muon_takes_the_hidden_matrices_alone():
    model = hybrid()
    names = hidden_matrices(model)
    assert all(name.startswith("model.layers.") and model.get_parameter(name).ndim == 2 for name in names)
    assert "model.layers.1.ffn.down_proj.weight" in names and "model.layers.0.mixer.A_log" not in names
    twin = hybrid()
    joint = MuonAdamW(model, lr=0.01, weight_decay=0.1)
    matrices, pulled = [twin.get_parameter(name) for name in names], set(decayed(twin))
    rest = {name: p for name, p in twin.named_parameters() if name not in names}
    apart = [
        torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for n, p in rest.items() if n in pulled], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1),
        torch.optim.AdamW([p for n, p in rest.items() if n not in pulled], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    ids = torch.randint(50, (2, 9))
    for _ in range(2):
        for each, optimizers in ((model, [joint]), (twin, apart)):
            each(ids, labels=ids).loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            each.zero_grad()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match="closure must be None"):
        joint.step(lambda: torch.zeros(()))


def test_muon_is_another_training_and_goes_on_exactly(short, text, tmp_path):
    whole = changed(text, tmp_path, optimizer="muon", save_every=1)
    assert distance(weights(whole), weights(short)) > 1e-2
    (whole.run / "checkpoint-3" / checkpoint.MARK).unlink()
    before = contents(whole.run / "checkpoint-3")
    train(replace(saved_options(whole.run), resume=True), progress=False)
    assert contents(whole.run / "checkpoint-3") == before


def test_prepared_documents(text, tmp_path):
    """A run on shards resumes exactly, has the shards' tokenizer, and refuses an additional text."""
    from linattn.data import prepare

    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": f"the fox jumps {i}"}) + "\n" for i in range(200)))
    prepare([tmp_path / "texts.jsonl"], tmp_path / "data", validation=0.1)
    asked = TrainOptions(
        mixer="gla", data=tmp_path / "data", steps=4, dim=32, layers=1, context=40, batch_size=2, accumulate=2, save_every=2, eval_every=2,
        out=tmp_path / "run",
    )  # fmt: skip
    seen, forward = [], LinattnForCausalLM.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LinattnForCausalLM, "forward", wraps(forward)(lambda self, **how: seen.append(how) or forward(self, **how)))
        result = train(asked, progress=False)
    training = [how for how in seen if how["input_ids"].shape == (1, 80)]
    assert len(training) == 8 and all(len(how["cu_seqlens"]) > 4 for how in training)
    before = contents(result.run / "checkpoint-4")
    (result.run / "checkpoint-4" / checkpoint.MARK).unlink()
    train(replace(saved_options(result.run), resume=True), progress=False)
    assert contents(result.run / "checkpoint-4") == before
    with pytest.raises(ValueError, match="omit text and tokenizer"):
        replace(asked, text=(str(text),))


def test_the_token_that_ends_documents_ends_texts(tmp_path):
    """It is copied from the shards to the run's tokenizer and generation settings."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from linattn.data import prepare

    made = Tokenizer(models.WordLevel({"<end>": 0, "fox": 1, "dog": 2, "[UNK]": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "texts.jsonl").write_text((json.dumps({"text": "fox dog fox"}) + "\n") * 80)
    prepare([tmp_path / "texts.jsonl"], tmp_path / "data", tokenizer=tmp_path / "tokenizer.json", end="<end>", validation=0.2)
    asked = TrainOptions(
        mixer="gla", data=tmp_path / "data", steps=60, dim=32, layers=1, context=8, batch_size=8, learning_rate=0.02, out=tmp_path / "run"
    )
    run = train(asked, progress=False).run
    model, tokenizer = AutoModelForCausalLM.from_pretrained(run), AutoTokenizer.from_pretrained(run)
    assert tokenizer.eos_token == "<end>" and model.generation_config.eos_token_id == model.config.eos_token_id == 0
    written = model.generate(torch.tensor([[1, 2]]), do_sample=False, max_new_tokens=20)[0].tolist()
    assert written == [1, 2, 1, 0]
