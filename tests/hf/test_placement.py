"""Every mixer in a model handled by other libraries: offloaded weights, low precision, adapters, unsplit blocks."""

import json
import os

import pytest
import torch
from transformers import AutoModelForCausalLM

import linattn
from linattn import mixers
from linattn.hf import LinattnForCausalLM
from tests.oracles import wheels
from tests.sweeps import swept

NAMES = [name for name in mixers.available() if (info := mixers.info(name)).kind == "sequence" and info.causal]


def model(mixer, **options) -> LinattnForCausalLM:
    config = linattn.LMConfig(**{"vocab_size": 50, "dim": 32, "layers": 1, "mixer": mixer, **options})
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("name", swept(NAMES))
def test_weights_that_come_when_they_are_called(name):
    from accelerate import cpu_offload

    lm, ids = model(name), torch.randint(50, (1, 9))
    with torch.no_grad():
        want = lm(ids).logits
        cpu_offload(lm, execution_device=torch.device("cpu"))
        assert all(p.is_meta for p in lm.parameters())
        cache, got = None, []
        for piece in ids.split((7, 1, 1), 1):
            out = lm(piece, past_key_values=cache)
            cache = out.past_key_values
            got.append(out.logits)
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_what_stays_wide_when_a_narrow_dtype_is_loaded(name, tmp_path):
    """Exactly the mixer's own, by full name: other parts may have weights of the same name."""
    lm = model(name)
    mixer = lm.model.layers[0].mixer
    kept = {f"model.layers.0.mixer.{own}" for own in mixer.keep_float32 if getattr(mixer, own) is not None}
    lm.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    wanted = lm.state_dict()
    for place, t in again.state_dict().items():
        if t.is_floating_point():
            assert t.dtype == (torch.float32 if place in kept else torch.bfloat16), place
            assert torch.equal(t, wanted[place].to(t.dtype)), place
    assert again(torch.randint(50, (1, 5))).logits.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_a_new_model_in_a_narrow_dtype(name):
    wanted = {place: t.dtype for place, t in model(name).to(torch.bfloat16).state_dict().items()}
    lm = AutoModelForCausalLM.from_config(linattn.LMConfig(vocab_size=50, dim=32, layers=1, mixer=name), dtype=torch.bfloat16).eval()
    assert {place: t.dtype for place, t in lm.state_dict().items()} == wanted
    assert torch.get_default_dtype() == torch.float32
    assert lm(torch.randint(50, (1, 5))).logits.isfinite().all()


def test_names_that_two_mixers_share_are_told_apart(tmp_path):
    lm = model("slstm, mamba, rwkv4", layers=3, norm="layer")
    lm.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    wide = {name for name, p in again.named_parameters() if p.dtype == torch.float32}
    places = {0: ("bias",), 1: ("A_log", "dt_bias"), 2: ("time_decay", "time_first")}
    assert wide == {f"model.layers.{i}.mixer.{name}" for i, names in places.items() for name in names}


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_never_split(name):
    from accelerate import infer_auto_device_map

    lm = model(name, layers=3)
    size = sum(t.numel() * t.element_size() for t in lm.model.layers[0].state_dict().values())
    places = infer_auto_device_map(lm, {0: int(2.5 * size), "cpu": 10**9}, no_split_module_classes=lm._no_split_modules)
    assert set(places.values()) == {0, "cpu"}
    assert not [part for part in places if part.startswith("model.layers.") and part.count(".") > 2]


@pytest.mark.parametrize("name", swept(NAMES))
def test_tied_weights(name, tmp_path):
    lm = model(name, tie_embeddings=True)
    assert lm.lm_head.weight is lm.model.embedding.weight
    lm.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.embedding.weight
    ids = torch.randint(50, (1, 5))
    assert torch.equal(again(ids).logits, lm(ids).logits)


ADAPTED = """
import json, sys, torch
from peft import LoraConfig, get_peft_model
from tests.hf.test_placement import NAMES, model

lacking = {}
for name in NAMES:
    torch.manual_seed(0)
    options = {"mixer_options": {name: {"segment": 8, "memory": 8}}} if name == "compressive_transformer" else {}  # so that it compresses
    adapters = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", r=2, init_lora_weights=False)
    lm = get_peft_model(model(name, **options), adapters)
    ids = torch.randint(50, (1, 20))
    logits = lm(input_ids=ids).logits
    logits.square().sum().backward()
    lacking[name] = [n for n, p in lm.named_parameters() if "lora_" in n and (p.grad is None or not p.grad.any())]
    torch.testing.assert_close(lm.merge_and_unload()(ids).logits, logits, rtol=1e-3, atol=1e-4, msg=lambda text: f"{name}: {text}")
print(json.dumps(lacking))
"""


@pytest.fixture(scope="module")
def unused(programs):
    """By mixer, adapters without effect on the output, found in a process with peft on its path, which is not installed."""
    found = os.pathsep.join([str(wheels.path("peft==0.21.2")), os.getcwd(), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": found, "OMP_NUM_THREADS": "1"}
    done = programs.python("-c", ADAPTED, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_adapters_of_every_map_are_asked(name, unused):
    assert not unused[name]
