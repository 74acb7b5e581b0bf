"""Common uses of transformers models: saving with a card, placement, inspection, training with Trainer and PEFT."""

import json
import os

import pytest
import torch
import yaml
from transformers import AutoModel, AutoModelForCausalLM, Trainer, TrainingArguments

import linattn
from linattn.hf import LinattnForCausalLM
from tests.oracles import wheels


def model(mixer="gla, softmax", **options) -> LinattnForCausalLM:
    config = linattn.LMConfig(**{"vocab_size": 50, "dim": 32, "layers": 2, "mixer": mixer, **options})
    return AutoModelForCausalLM.from_config(config).eval()


def ids_of(*shape) -> torch.Tensor:
    return torch.randint(50, shape)


# The folder


@pytest.mark.parametrize("mixer", ["gla", "gated_deltanet, softmax"])
def test_a_saved_folder_has_a_card_with_the_facts(mixer, tmp_path):
    lm = model(mixer, tie_embeddings=True).bfloat16()
    lm.save_pretrained(tmp_path / "mine")
    _, head, text = (tmp_path / "mine" / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["linattn", "linear-attention", *mixer.split(", ")],
    }
    assert text.startswith("\n# mine\n")
    assert f"{sum(p.numel() for p in lm.parameters()):,} parameters in bfloat16" in text
    for fact in ("| Layers | 2 |", "| Width | 32 |", f"| Mixer of each layer | {mixer} |", "| Embedding and head | tied |"):
        assert fact in text
    for name in mixer.split(", "):
        info = linattn.mixers.info(name)
        assert f"- `{name}`: {info.title} ([arXiv {info.arxiv}](https://arxiv.org/abs/{info.arxiv}))" in text
    assert ("has a constant size" in text) is ("softmax" not in mixer)
    assert linattn.__version__ in text


def test_the_cards_code_runs(tmp_path, programs):
    """In a new process."""
    model().save_pretrained(tmp_path)
    code = (tmp_path / "README.md").read_text().split("```python\n")[1].split("```")[0].replace("path/to/this/folder", str(tmp_path))
    done = programs.python("-c", f"{code}\nprint(tokens.shape)")
    assert done.stdout == "torch.Size([1, 21])\n", done.stderr


def test_an_authors_card_stays(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    model().save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
    model().save_pretrained(tmp_path / "other", is_main_process=False)
    assert not (tmp_path / "other" / "README.md").exists()


@pytest.mark.parametrize("tie", [False, True])
def test_weights_in_several_files(tie, tmp_path):
    lm, ids = model(tie_embeddings=tie), ids_of(1, 8)
    lm.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]) == len(lm.state_dict()) - tie
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (again.lm_head.weight is again.model.embedding.weight) is tie
    assert torch.equal(again(ids).logits, lm(ids).logits)


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForCausalLM])
def test_pickles_are_refused(auto, tmp_path):
    lm = model()
    lm.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(lm.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"model.safetensors"):
        auto.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="use_safetensors must be True: a pickle can run code"):
        auto.from_pretrained(tmp_path, use_safetensors=False)


def test_tied_weights_stay_tied_when_tokens_are_added():
    lm = model(tie_embeddings=True)
    lm.resize_token_embeddings(60)
    assert lm.lm_head.weight is lm.model.embedding.weight
    assert lm(torch.tensor([[59]])).logits.shape == (1, 1, 60)


@pytest.mark.parametrize("tie", [False, True])
def test_logits_stay_capped_when_tokens_are_added(tie, tmp_path):
    lm, ids = model(logit_soft_cap=0.1, tie_embeddings=tie), ids_of(1, 8)
    want = lm(ids).logits
    lm.resize_token_embeddings(60)
    logits = lm(ids).logits
    torch.testing.assert_close(logits[..., :50], want)
    assert logits.shape[-1] == lm.lm_head.out_features == 60
    lm.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, logits)


# Placement and precision


@pytest.mark.parametrize("mixer", ["gla, softmax", "mamba2", "gated_deltanet"])
def test_device_map(mixer, tmp_path):
    lm, ids = model(mixer), ids_of(1, 8)
    lm.save_pretrained(tmp_path)
    want = lm.generate(ids, max_new_tokens=3, do_sample=False)
    for device_map in ("cpu", "auto", {"": "cpu"}):
        again = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
        assert torch.equal(again.generate(ids, max_new_tokens=3, do_sample=False), want)
    parts = {"model.embedding": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu", "lm_head": "cpu"}
    again = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=parts, offload_folder=tmp_path / "offload")
    assert next(again.model.layers[1].parameters()).is_meta
    with pytest.raises(ValueError, match="'model.layers.1.* are not in memory"):
        again.prefill(ids).save(tmp_path / "state", model=again)
    assert torch.equal(again.generate(ids, max_new_tokens=3, do_sample=False), want)


def test_blocks_are_never_split():
    from accelerate import infer_auto_device_map

    lm = model(layers=4)
    size = sum(p.numel() * 4 for p in lm.model.layers[0].parameters())
    places = infer_auto_device_map(lm, {0: int(2.5 * size), "cpu": 10**9}, no_split_module_classes=lm._no_split_modules)
    assert not [name for name in places if name.startswith("model.layers.") and name.count(".") > 2]
    assert len(set(places.values())) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_time_constants_stay_wide(dtype, tmp_path):
    lm = model("mamba2, gated_deltanet")
    lm.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    wide = {name.rsplit(".", 1)[-1] for name, p in again.named_parameters() if p.dtype == torch.float32}
    assert wide == {"A_log", "dt_bias"}
    assert again(ids_of(1, 4)).logits.dtype == dtype


# Looking inside


@pytest.mark.parametrize("how", ["plain", "cached", "checkpointed"])
def test_hidden_states(how):
    lm, ids = model(), ids_of(2, 7)
    want = [lm.model.embedding(ids)]
    for layer in lm.model.layers:
        want.append(layer(want[-1])[0])
    want[-1] = lm.model.norm(want[-1])
    if how == "checkpointed":
        lm.train()
        getattr(lm, "activation_checkpointing_enable", lm.gradient_checkpointing_enable)()  # its name before transformers 5.23
    if how == "cached":
        first, second = (lm(ids[:, :4], output_hidden_states=True),) * 2
        second = lm(ids[:, 4:], past_key_values=first.past_key_values, output_hidden_states=True)
        got = [torch.cat(pair, 1) for pair in zip(first.hidden_states, second.hidden_states, strict=True)]
    else:
        got = lm(ids, output_hidden_states=True).hidden_states
    assert len(got) == 3
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    if how == "checkpointed":
        got[1].sum().backward()
        assert len(got) == 3  # recomputation in the backward pass is not recorded
    assert lm(ids).hidden_states is None
    assert not lm.model.layers[0]._forward_pre_hooks


def test_hidden_states_elsewhere():
    lm, ids = model(), ids_of(1, 5)
    base = AutoModel.from_config(lm.config).eval()
    out = base(ids, output_hidden_states=True)
    assert torch.equal(out.hidden_states[-1], out.last_hidden_state)
    out = lm.generate(ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_hidden_states=True)
    assert [[tuple(t.shape) for t in step] for step in out.hidden_states] == [[(1, n, 32)] * 3 for n in (5, 1, 1)]
    lm.config.output_hidden_states = True
    assert len(lm(ids).hidden_states) == 3
    with pytest.raises(ValueError, match="output_attentions must not be True"):
        lm(ids, output_attentions=True)


# Training


def batches() -> list[dict[str, torch.Tensor]]:
    """Counting sequences, easy to learn."""
    rows = [(torch.arange(12) + start) % 50 for start in range(32)]
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(folder, **options) -> TrainingArguments:
    how = {"max_steps": 12, "per_device_train_batch_size": 8, "learning_rate": 1e-2, "report_to": "none", "use_cpu": True}
    how |= {"save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, "seed": 1}
    return TrainingArguments(str(folder), **how | options)


NAMES = ("activation_checkpointing", "gradient_checkpointing")  # since transformers 5.23, and before
CHECKPOINTING = next(name for name in NAMES if hasattr(TrainingArguments, name))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_stock_trainer(checkpointing, tmp_path):
    lm = model().train()
    before = {name: p.detach().clone() for name, p in lm.named_parameters()}
    how = arguments(tmp_path, max_steps=40, **{CHECKPOINTING: checkpointing})
    trainer = Trainer(lm, how, train_dataset=batches(), eval_dataset=batches()[:4])
    trainer.train()
    assert lm.model.gradient_checkpointing is checkpointing
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    assert losses[-1] < 0.5 * losses[0]
    assert trainer.evaluate()["eval_loss"] < losses[0]
    assert not [name for name, p in lm.named_parameters() if torch.equal(p, before[name])]
    trainer.save_model(tmp_path / "end")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "end")
    ids = ids_of(1, 6)
    assert torch.equal(again(ids).logits, lm.eval()(ids).logits)
    assert (tmp_path / "end" / "README.md").is_file()


def test_the_stock_trainer_goes_on_exactly(tmp_path):
    ends = []
    for resumed in (False, True):
        torch.manual_seed(0)
        trainer = Trainer(model().train(), arguments(tmp_path, save_strategy="steps", save_steps=6), train_dataset=batches())
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6") if resumed else None)
        ends.append(trainer.model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ends[0].values(), ends[1].values(), strict=True))


PEFT = """
import sys, torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Trainer
import linattn
from tests.hf.test_ordinary import arguments, batches, ids_of, model

folder = sys.argv[1]
torch.manual_seed(0)
lm = model("gated_deltanet, gla, softmax", layers=3)
lm.save_pretrained(folder + "/base")
frozen = {name: p.detach().clone() for name, p in lm.named_parameters()}
lora = get_peft_model(lm, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", r=4))
trainer = Trainer(lora, arguments(folder, max_steps=40, learning_rate=3e-2), train_dataset=batches())
trainer.train()
losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
assert losses[-1] < losses[0] - 0.3, losses  # the head under it is random and stays so
trained = [p for name, p in lora.named_parameters() if "lora_B" in name]
assert len(trained) >= 3 * 7 and all(p.abs().max() > 0 for p in trained)
kept = {name.replace("base_layer.", "").removeprefix("base_model.model."): p for name, p in lora.named_parameters() if "lora_" not in name}
assert kept.keys() == frozen.keys() and all(torch.equal(p, frozen[name]) for name, p in kept.items())
lora.eval().save_pretrained(folder + "/adapter")

ids = ids_of(2, 6)
want = ids
for _ in range(5):
    want = torch.cat([want, lora(input_ids=want, use_cache=False).logits[:, -1:].argmax(-1)], 1)
assert torch.equal(lora.generate(input_ids=ids, max_new_tokens=5, do_sample=False), want)
state = lora.prefill(ids[:, :4])
assert torch.equal(lora.generate(input_ids=ids[:, 4:], state=state, max_new_tokens=5, do_sample=False)[:, 2:], want[:, 6:])
from linattn.state.identity import identity
told = identity(lm)
with lora.disable_adapter():  # the same weights, another model
    assert identity(lm)["weights"] != told["weights"]
assert identity(lm) == told
how = {"input_ids": ids, "max_new_tokens": 80, "do_sample": False}  # so many that a captured step writes them
base = AutoModelForCausalLM.from_pretrained(folder + "/base").generate(**how)
adapted = lora.generate(**how)
with lora.disable_adapter():
    assert torch.equal(lora.generate(**how), base)
assert torch.equal(lora.generate(**how), adapted) and not torch.equal(adapted, base)
again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder + "/base"), folder + "/adapter").eval()
assert torch.equal(again(input_ids=ids).logits, lora(input_ids=ids).logits)
merged = again.merge_and_unload()
torch.testing.assert_close(merged(ids).logits, lora(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
wanted = merged(ids).logits
for adapters in ({"target_modules": ["embedding"]}, {"target_modules": ["up_proj"], "trainable_token_indices": [1]}):
    words = get_peft_model(merged, LoraConfig(task_type="CAUSAL_LM", r=4, **adapters))
    assert torch.equal(words(input_ids=ids).logits, wanted)
    words.unload()

linattn.quantize(merged, group=32).save_pretrained(folder + "/int4")
small = AutoModelForCausalLM.from_pretrained(folder + "/int4")
base = small(ids).logits
lora = get_peft_model(small, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", r=4))
trainer = Trainer(lora, arguments(folder, max_steps=20, learning_rate=3e-2), train_dataset=batches())
trainer.train()
losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
assert min(losses[-5:]) < min(losses[:5]), losses
adapted = lora.eval()(input_ids=ids).logits
lora.save_pretrained(folder + "/small")
again = PeftModel.from_pretrained(linattn.load(folder + "/int4"), folder + "/small").eval()
assert torch.equal(again(input_ids=ids).logits, adapted) and not torch.equal(adapted, base)
pissa = LoraConfig(target_modules=["o_proj"], init_lora_weights="pissa")
for change in (lora.merge_and_unload, lambda: get_peft_model(linattn.load(folder + "/int4"), pissa)):
    try:
        change()
    except TypeError as error:
        assert "merge adapters into the model before quantisation" in str(error)
    else:
        raise AssertionError("values that are set in a quantised weight were lost")
print("trained", len(trained))
"""


def test_lora(tmp_path, programs):
    """In a separate process with peft on its path, which is not installed."""
    found = os.pathsep.join([str(wheels.path("peft==0.21.2")), os.getcwd(), os.environ.get("PYTHONPATH", "")])
    done = programs.python("-c", PEFT, tmp_path, env={**os.environ, "PYTHONPATH": found, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("trained")
