"""Quantised models: selection of layers, outputs, gradients, files and decoding."""

import json

import pytest
import torch

import linattn
from linattn.data import ByteCodec
from linattn.evaluation import EvaluateOptions, measure
from linattn.generate import Pool, stream
from linattn.generate.walkthrough import walkthrough
from linattn.mixers import Mixer
from linattn.models import LMConfig
from linattn.models.quantised import floats, formats, parameter_count
from linattn.quantization import save
from linattn.quantization.sparing import gate_rows

IDS = torch.arange(60).view(2, 30) * 7 % 256
SMALL = {"dim": 64, "layers": 2, "vocab_size": 256}


def made(mixer="gla", **more):
    torch.manual_seed(0)
    return linattn.LanguageModel(LMConfig(mixer=mixer, **{**SMALL, **more})).eval()


def plain_twin(quantised, model):
    """``model`` with the weights of ``quantised`` as floats."""
    model.load_state_dict(floats(quantised))
    return model


@pytest.mark.parametrize("mixer", ["gla", "gated_deltanet", "mamba2", "rwkv7", "hgrn2", "mlstm", "softmax", "mla", "mamba"])
@pytest.mark.parametrize("to", ["int8", "int4"])
def test_outputs_and_gradients_are_those_of_the_rounded_weights(mixer, to):
    wide = linattn.quantize(made(mixer), to=to, group=32).double()
    twin = plain_twin(wide, made(mixer).double())
    with torch.no_grad():
        assert (wide(IDS) - twin(IDS)).norm() <= 1e-9 * twin(IDS).norm()
    grads = []
    for m in (wide, twin):
        x = torch.randn(1, 9, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
        hidden, _ = m.model(embeddings=x)
        m.lm_head(hidden).square().sum().backward()
        grads.append(x.grad)
    assert (grads[0] - grads[1]).norm() <= 1e-8 * grads[1].norm()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mixer", ["gla", "gated_deltanet", "mamba2"])
def test_captured_steps_write_what_the_model_says(mixer, tied):
    q = linattn.quantize(made(mixer, tie_embeddings=tied), to="int4", group=64, head="int4" if mixer == "gla" else "int8")
    twin = plain_twin(q, made(mixer, tie_embeddings=tied))
    tokens = [int(t) for t in stream(q, IDS[0], max_new_tokens=80, temperature=0)]
    with torch.no_grad():
        logits = twin(torch.cat([IDS[0], torch.tensor(tokens)])[None])[0, len(IDS[0]) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert bool((chosen >= logits.amax(1) - 1e-3 * logits.std(1)).all())


def test_what_is_quantised():
    q = linattn.quantize(made("mamba2", tie_embeddings=False), to="int4", group=64)
    told = formats(q)
    mixer = q.model.layers[0].mixer
    assert told["model.embedding"].to == told["lm_head"].to == "int8" and told["model.layers.0.mixer.o_proj"].group == 64
    coarse = formats(linattn.quantize(made("mamba2", tie_embeddings=False), to="int4", group=64, head="int4"))
    assert coarse["model.embedding"].group == coarse["lm_head"].group == 64
    assert told["model.layers.0.mixer.in_proj"].kept == (mixer.convolved, mixer.convolved + mixer.heads)  # the time steps
    assert all("conv" not in name and "norm" not in name for name in told)
    delta = formats(linattn.quantize(made("gated_deltanet"), to="int4"))
    assert not any(name.endswith(("a_proj", "b_proj")) for name in delta) and "model.layers.0.mixer.g_proj" in delta
    sizes = [sum(t.nbytes for t in m.state_dict().values()) for m in (made("gla"), linattn.quantize(made("gla"), to="int8"))]
    assert sizes[1] < 0.32 * sizes[0]  # of float32


@pytest.mark.parametrize("name", linattn.mixers.available())
def test_gates_of_every_mixer_are_found_or_named(name):
    if linattn.mixers.info(name).kind != "sequence":
        return
    torch.manual_seed(0)
    mixer = linattn.mixers.create(name, dim=64)
    found = gate_rows(mixer)
    assert found.keys() <= {n for n, _ in mixer.named_modules()}
    if type(mixer).project is not Mixer.project:
        x = torch.randn(1, 5, 64)
        projected = mixer.project(x, mixer.begin(x))
        r = projected[0] if isinstance(projected, tuple) else projected
        with torch.no_grad():  # the rest does not affect the decays
            for n, m in mixer.named_modules():
                if type(m) is torch.nn.Linear:
                    first, last = found.get(n, (0, 0))
                    keep = torch.zeros(m.out_features, 1, dtype=torch.bool)
                    keep[first:last] = True
                    m.weight.copy_(torch.where(keep, m.weight, m.weight * 1.5))
        again = mixer.project(x, mixer.begin(x))
        again = again[0] if isinstance(again, tuple) else again
        for one, other in ((r.decay, again.decay), (r.beta, again.beta)):
            assert one is None or torch.allclose(one, other, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("mixer", ["gla", "gated_deltanet", "mamba2", "kda"])
def test_gates_are_few(mixer):
    """Unquantised rows for decays and write strengths are a small share of a mixer's weights."""
    layer = linattn.mixers.create(mixer, dim=256)
    kept = sum((last - first) * layer.get_submodule(n).in_features for n, (first, last) in gate_rows(layer).items())
    assert 0 < kept < 0.12 * sum(p.numel() for p in layer.parameters())


def test_calibration_lowers_the_error():
    model = made(dim=128)
    ids = torch.randint(256, (16, 64), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        wanted = model(ids)
        errors = [float((linattn.quantize(model, calibrate=c)(ids) - wanted).norm()) for c in (None, ids)]
    assert errors[1] < 0.98 * errors[0]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("to", ["int8", "int4"])
def test_quantised_weights_are_counted(to, tied):
    model = made(tie_embeddings=tied)
    assert parameter_count(linattn.quantize(model, to=to)) == parameter_count(model) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_files(tmp_path, tied):
    from safetensors.torch import load_file, save_file
    from transformers import AutoModel, AutoModelForCausalLM

    from linattn.hf import LinattnForCausalLM
    from linattn.hf import LMConfig as Config

    torch.manual_seed(0)
    model = LinattnForCausalLM(Config(mixer="gla, softmax", tie_embeddings=tied, **SMALL)).bfloat16().eval()
    q = linattn.quantize(model, to="int4")
    with torch.no_grad():
        wanted = q(IDS).logits
        save(q, tmp_path / "one")
        q.save_pretrained(tmp_path / "two")
        for name in ("one", "two"):
            again = linattn.load(tmp_path / name)
            assert torch.equal(again(IDS).logits, wanted) and again.dtype == torch.bfloat16
            theirs = AutoModelForCausalLM.from_pretrained(tmp_path / name, trust_remote_code=True)
            assert torch.equal(theirs(IDS).logits, wanted) and theirs.dtype == torch.bfloat16
            assert {n: t.dtype for n, t in theirs.state_dict().items()} == {n: t.dtype for n, t in again.state_dict().items()}
            assert theirs.half().config.to_dict()["quantization_config"] == again.config.quantization_config
            assert (theirs.lm_head.codes.data_ptr() == theirs.model.embedding.codes.data_ptr()) == tied
            hidden = AutoModel.from_pretrained(tmp_path / name)(IDS).last_hidden_state
            assert torch.equal(q.lm_head(hidden), wanted)
        card = (tmp_path / "two" / "README.md").read_text()
        assert f" {parameter_count(model):,} parameters in bfloat16" in card
        assert "| Matrices quantised to | int4, int8 |" in card
        weights = load_file(tmp_path / "two" / "model.safetensors")
        del weights["model.layers.0.mixer.o_proj.codes"]
        save_file(weights, tmp_path / "two" / "model.safetensors", {"format": "pt"})
        for read in (AutoModelForCausalLM.from_pretrained, linattn.load):
            with pytest.raises(ValueError, match=r"[mM]issing.* model\.layers\.0\.mixer\.o_proj\.codes"):
                read(tmp_path / "two")
    content = json.loads((tmp_path / "one" / "config.json").read_text())
    assert content["quantization_config"]["modules"]["model.layers.0.mixer.o_proj"] == {"to": "int4", "group": 64}
    content["quantization_config"]["modules"]["model.layers.9.mixer.q_proj"] = {"to": "int8"}
    (tmp_path / "one" / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"no linear layer or embedding 'model\.layers\.9"):
        linattn.load(tmp_path / "one")
    with pytest.raises(FileExistsError):
        save(q, tmp_path / "two")


def test_adapters_learn_beside_a_frozen_base():
    """Two low-rank matrices beside a quantised weight, as in QLoRA: the base stays, the loss falls."""
    q = linattn.quantize(made(), to="int4")
    for p in q.parameters():
        p.requires_grad_(False)
    base = q.model.layers[1].mixer.o_proj
    codes = base.codes.clone()

    class Adapted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.down, self.up = base, torch.nn.Linear(64, 8, bias=False), torch.nn.Linear(8, 64, bias=False)
            torch.nn.init.zeros_(self.up.weight)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    q.model.layers[1].mixer.o_proj = Adapted()
    adapter = q.model.layers[1].mixer.o_proj
    optimizer = torch.optim.Adam([adapter.down.weight, adapter.up.weight], 1e-2)
    losses = []
    for _ in range(10):
        loss = torch.nn.functional.cross_entropy(q(IDS)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.05 and torch.equal(base.codes, codes)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", ["int4", "int8"])
def test_decoding_never_unpacks_the_head_or_the_embedding(tied, head, monkeypatch):
    q = linattn.quantize(made(tie_embeddings=tied), to="int4", head=head)
    monkeypatch.setattr(type(q.lm_head), "weight", property(lambda _: pytest.fail("the weight of the head was unpacked")))
    monkeypatch.setattr(type(q.model.embedding), "weight", property(lambda _: pytest.fail("the weight of the embedding was unpacked")))
    assert q.device == q.model.device == torch.device("cpu")
    for keywords in ({}, {"lookup": True}, {"draft": q}):
        assert len(list(stream(q, IDS[0], max_new_tokens=5, temperature=1.0, **keywords))) == 5
    for lookup in (False, True):
        pool = Pool(q, slots=2, lookup=lookup)
        requests = [pool.submit(ids, max_new_tokens=5, temperature=1.0, seed=0) for ids in IDS]
        assert len(list(pool.run())) == 10 and all(len(r.tokens) == 5 for r in requests)
    assert measure.on_text(q, IDS.flatten().tolist(), 120, EvaluateOptions(context=40), teacher=q)["kl"] == 0
    assert walkthrough(q, ByteCodec(), "a b", max_new_tokens=2).written


def test_dtypes_move_and_scales_stay():
    q = linattn.quantize(made(), to="int4").bfloat16()
    assert q.model.layers[0].mixer.o_proj.scale.dtype == torch.float16 and q.model.embedding.scale.dtype == torch.float32
    assert q(IDS).dtype == torch.bfloat16
    assert q.lm_head.weight.dtype == torch.bfloat16 and q.float()(IDS).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_scales_do_not_follow_the_default_dtype(dtype):
    model = made()
    wanted = {n: t.dtype for n, t in linattn.quantize(model).state_dict().items()}
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert {n: t.dtype for n, t in linattn.quantize(model).state_dict().items()} == wanted
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("to", ["int8", "int4"])
def test_inputs_that_do_not_fit_are_refused(to, tokens):
    """Without this, kernels read beyond the input."""
    layer = linattn.quantize(made(), to=to).model.layers[0].mixer.o_proj
    for x in (torch.ones(tokens, 63), torch.ones(tokens, 128), torch.ones(tokens, 64, dtype=torch.long), torch.ones(())):
        with pytest.raises(ValueError, match=r"x must be floats \[\.\.\., 64\] for a matrix \[64, 64\], but came as torch"):
            layer(x)


def test_a_new_model_of_a_quantised_ones_config_is_saved_as_it_is(tmp_path):
    from linattn.hf import LinattnForCausalLM
    from linattn.hf import LMConfig as Config

    q = linattn.quantize(LinattnForCausalLM(Config(mixer="gla", **SMALL)))
    for new in (LinattnForCausalLM(q.config).eval(), linattn.load(q.config.to_dict())):
        new.save_pretrained(tmp_path / "new")
        assert torch.equal(linattn.load(tmp_path / "new")(IDS).logits, new(IDS).logits)
    q.save_pretrained(tmp_path / "int4")
    assert formats(linattn.load(tmp_path / "int4")) == formats(q)


@pytest.mark.parametrize("factor", [1e-9, 1e-5, 1.0, 1e9, 0.0])
@pytest.mark.parametrize("calibrate", [None, IDS])
def test_weights_of_any_size_keep_their_digits(factor, calibrate):
    """Scales of 4 bits are float16, in which very small ones are 0 and large ones infinite."""
    model = made()
    weight = model.model.layers[0].mixer.o_proj.weight.detach()
    weight.mul_(factor)
    layer = linattn.quantize(model, to="int4", calibrate=calibrate).model.layers[0].mixer.o_proj
    assert (layer.weight - weight).norm() <= 0.25 * weight.norm()
    assert layer.format.to == ("int4" if factor in (0.0, 1.0) else "int8")


def test_values_set_in_a_quantised_weight_are_refused():
    """Not lost: PEFT merges adapters into ``weight.data``."""
    q = linattn.quantize(made("mamba2"), to="int4")
    for layer in (q.model.layers[0].mixer.in_proj, q.model.layers[0].mixer.o_proj, q.model.embedding):
        weight = layer.weight
        with pytest.raises(TypeError, match="merge adapters into the model before quantisation"):
            layer.weight.data += 1
        assert torch.equal(layer.weight, weight) and type(weight * 2) is type(weight.detach()) is torch.Tensor


def test_bad_arguments():
    model = made()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(ValueError, match="to must be one of"):
        linattn.quantize(model, to="int3")
    with pytest.raises(ValueError, match="head must be one of"):
        linattn.quantize(model, head="float8")
    with pytest.raises(ValueError, match="group must be one of"):
        linattn.quantize(model, group=48)
    with pytest.raises(TypeError, match="model must be a linattn"):
        linattn.quantize(torch.nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"calibrate must be tokens \[N, T\]"):
        linattn.quantize(model, calibrate=torch.arange(4))
    with pytest.raises(ValueError, match="calibrate must be .* with values, but came with shape .* on meta"):
        linattn.quantize(model, calibrate=torch.ones(1, 4, dtype=torch.long, device="meta"))
    with pytest.raises(ValueError, match="calibrate"):
        linattn.quantize(model, calibrate=torch.full((1, 4), 999))
    with pytest.raises(ValueError, match="quantised already"):
        linattn.quantize(linattn.quantize(model))
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_the_command(tmp_path, monkeypatch, capsys):
    from linattn.cli.main import main
    from linattn.hf import LinattnForCausalLM
    from linattn.hf import LMConfig as Config
    from linattn.train import load_run

    torch.manual_seed(0)
    LinattnForCausalLM(Config(mixer="gated_deltanet", **SMALL)).save_pretrained(tmp_path / "run")
    text = tmp_path / "text.txt"
    text.write_text("a text of some bytes " * 40)
    assert main(["quantize", str(tmp_path / "run"), "--to", "int4", "--group", "32", "--calibrate", str(text), "--context", "64"]) == 0
    model, codec = load_run(tmp_path / "run-int4")
    assert {form.group for name, form in formats(model).items() if "layers" in name} == {32} and codec.vocab_size == 256
    assert main(["quantize", str(tmp_path / "run"), "--to", "int4"]) == 2  # the folder is there
    assert main(["quantize", str(tmp_path / "run"), "--to", "int2", "--out", str(tmp_path / "other")]) == 2
    assert not (tmp_path / "other").exists()
    capsys.readouterr()
    assert main(["quantize", str(tmp_path / "run"), "--to", "../int4"]) == 2
    assert "--to must be one of 'int8', 'int4', but came as '../int4'" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path / "run")
    assert main(["quantize", ".", "--to", "int8"]) == 0 and (tmp_path / "run-int8" / "config.json").is_file()
    capsys.readouterr()
    assert main(["quantize", str(tmp_path / "run"), "--out", str(tmp_path / "none" / "deep")]) == 2
    assert "none does not exist" in (said := capsys.readouterr().err) and "quantising" not in said  # before the work


def test_a_gguf_files_tokenizer_is_taken_along(tmp_path, capsys):
    pytest.importorskip("gguf")
    from linattn.cli.main import main
    from linattn.hf.gguf.write import export_gguf
    from linattn.hf.tokenizer import tokenizer_of
    from linattn.train import load_run

    tokenizer_of(ByteCodec()).save_pretrained(tmp_path)
    model = made("mamba2", ffn="none", vocab_size=257)
    export_gguf(model, tmp_path / "a.gguf", tokenizer=tmp_path)
    assert main(["quantize", str(tmp_path / "a.gguf"), "--to", "int8"]) == 0
    codec = load_run(tmp_path / "a-int8")[1]
    assert codec.encode("né") == load_run(tmp_path / "a.gguf")[1].encode("né") == list("né".encode())
    capsys.readouterr()
    assert main(["export", str(tmp_path / "a-int8"), str(tmp_path / "b"), "--to", "mamba2"]) == 0
    assert f"Mamba2ForCausalLM, {parameter_count(model):,} parameters" in capsys.readouterr().out


@pytest.mark.parametrize(("dtype", "head"), [("Q4_0", "int4"), ("Q4_0", "int8"), ("Q8_0", "int8")])
def test_gguf_files_have_the_same_numbers(tmp_path, dtype, head):
    gguf = pytest.importorskip("gguf")
    from linattn.hf.gguf.write import export_gguf

    q = linattn.quantize(made("mamba2", ffn="none", tie_embeddings=True), to={"Q4_0": "int4", "Q8_0": "int8"}[dtype], group=32, head=head)
    export_gguf(q, tmp_path / "model.gguf", dtype=dtype)
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert tensors["token_embd.weight"].tensor_type.name == {"int4": "Q4_0", "int8": "Q8_0"}[head]
    pairs = {"token_embd.weight": q.model.embedding, "blk.0.ssm_out.weight": q.model.layers[0].mixer.o_proj}
    for name, module in pairs.items():
        there = torch.from_numpy(gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type).copy())
        if tensors[name].tensor_type.name == "Q4_0":
            assert torch.equal(there, module.weight)
        else:  # rounded again, to 127ths of each block's largest, with a scale of 11 bits
            assert (there - module.weight).abs().max() <= module.weight.abs().max() * (0.5 / 127 + 2**-11)
