"""Trainers that call parts of a model: TRL's, if installed, and equivalent calls otherwise.

TRL and PEFT are not among the packages of the tests: ``pip install trl peft`` runs the first half of this file.
"""

import importlib.util

import pytest
import torch
import torch.nn.functional as F

import linattn
from linattn.data.codec import ByteCodec
from linattn.hf import LinattnForCausalLM, LinattnModel, StateCache
from linattn.hf.tokenizer import tokenizer_of

needs_trl = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("trl", "peft", "datasets")), reason="not installed: pip install trl peft"
)


def model() -> LinattnForCausalLM:
    torch.manual_seed(0)
    return LinattnForCausalLM(linattn.LMConfig(vocab_size=256, dim=32, layers=2, mixer="gla, softmax"))


def test_the_inner_backbone_answers_as_a_model_of_transformers():
    lm, ids = model().eval(), torch.randint(256, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, :3] = 0
    for inner in (lm.model, lm.base_model, lm.get_decoder()):
        wanted = lm(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=True)
        found = inner(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=True)
        assert torch.equal(lm.lm_head(found.last_hidden_state), wanted.logits)
        assert len(found.hidden_states) == 3 and isinstance(found.past_key_values, StateCache)
        following = inner(input_ids=ids[:, :1], past_key_values=found.past_key_values)[0]
        assert torch.equal(lm.lm_head(following), lm(ids[:, :1], past_key_values=wanted.past_key_values).logits)
    assert torch.equal(lm.model(inputs_embeds=lm.model.embedding(ids))[0], lm.model(ids)[0])
    assert lm.model(input_ids=ids, use_cache=False, return_dict=False)[0].shape == (2, 9, 32)
    with pytest.raises(TypeError, match="unexpected keyword argument 'inputs'"):
        lm.model(input_ids=ids, inputs=3)
    with pytest.raises(ValueError, match="output_attentions must not be True"):
        lm.model(input_ids=ids, output_attentions=True)


def test_the_backbone_is_still_ours():
    """Positional ids and a state, as in generate() and LanguageModel; weights have LinattnModel's names."""
    lm, ids = model().eval(), torch.randint(256, (2, 9))
    hidden, state = lm.model(ids, return_state=True)
    assert state.rows == 2 and torch.equal(hidden, lm.model(input_ids=ids).last_hidden_state)
    assert set(LinattnModel(lm.config).state_dict()) == {name for name in lm.state_dict() if name != "lm_head.weight"}


def test_gradients_by_way_of_the_backbone_are_those_of_the_model():
    """Log probabilities from hidden states, as in GRPO."""
    lm, ids = model(), torch.randint(256, (2, 9))
    loss = lm(ids, labels=ids).loss
    hidden = lm.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).last_hidden_state
    apart = F.cross_entropy(lm.lm_head(hidden[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    for ours, theirs in zip(*(torch.autograd.grad(each, lm.parameters()) for each in (apart, loss)), strict=True):
        torch.testing.assert_close(ours, theirs)


def arguments(folder, **given):
    return {"output_dir": str(folder), "max_steps": 2, "report_to": "none", "use_cpu": True, "bf16": False, "save_strategy": "no", **given}


def adapters():
    from peft import LoraConfig

    return LoraConfig(target_modules="all-linear", r=2)


def moved(trainer) -> bool:
    """True if training changes the trained weights."""
    trained = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    return any(not torch.equal(p, trained[name]) for name, p in trainer.model.named_parameters() if name in trained)


@needs_trl
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("peft", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_supervised_fine_tuning(peft, packing, tmp_path):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    how = SFTConfig(**arguments(tmp_path, per_device_train_batch_size=2, max_length=64, packing=packing))
    data = Dataset.from_dict({"text": ["the quick brown fox"] * 8})
    assert moved(
        SFTTrainer(model(), how, train_dataset=data, processing_class=tokenizer_of(ByteCodec()), peft_config=adapters() if peft else None)
    )


@needs_trl
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("peft", [False, True])
def test_group_relative_policy_optimisation(peft, tmp_path):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    how = GRPOConfig(**arguments(tmp_path, per_device_train_batch_size=4, num_generations=4, max_completion_length=8, learning_rate=0.1))
    data = Dataset.from_dict({"prompt": ["the quick "] * 8})
    rewards = lambda completions, **_: [float(len(set(text))) for text in completions]  # noqa: E731
    given = {"train_dataset": data, "processing_class": tokenizer_of(ByteCodec()), "peft_config": adapters() if peft else None}
    assert moved(GRPOTrainer(model(), rewards, how, **given))
