"""The untrained student: weights shared with the teacher, and its gates."""

import pytest
import torch
import torch.nn.functional as F

from linattn import mixers
from linattn.distill.copying import TAP, spread
from linattn.distill.student import config_with, layers_of, replaced, student_layers, student_of, written
from linattn.hf import LinattnForCausalLM, LMConfig
from linattn.models import LanguageModel, pattern
from linattn.models import LMConfig as PlainConfig
from tests.convert.models import softmax_model

IDS = torch.arange(2 * 24).view(2, 24) * 7 % 256


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_embeddings": True, "embedding_scale": 5.0, "logit_soft_cap": 20.0, "residual_scales": {"softmax": [0.9, 0.5]}},
        {"options": {"window": 5, "bias": True, "out_bias": True, "norm_eps": 1e-6, "gated": True, "rotated": 4}, "block": "post"},
    ],
)
def test_with_every_layer_kept_the_logits_are_the_teachers(fields, dtype, bound):
    teacher = softmax_model(**fields).to(dtype)
    for p in teacher.parameters():
        torch.nn.init.normal_(p, std=0.2)
    student = student_of(teacher, student_layers(teacher, "softmax", mixer_options={}))
    assert student.lm_head.weight is not student.model.embedding.weight
    with torch.no_grad():
        wanted, got = teacher(IDS).logits, student(IDS).logits
    assert got.dtype == dtype
    assert (got - wanted).norm() <= bound * wanted.norm()


def test_a_plain_language_model_is_a_teacher():
    teacher = LanguageModel(PlainConfig(dim=32, layers=2, mixer="softmax")).eval()
    student = student_of(teacher, student_layers(teacher, "gla, softmax", mixer_options={}))
    assert isinstance(student, LinattnForCausalLM)
    assert torch.equal(student.model.layers[1].mixer.q_proj.weight, teacher.model.layers[1].mixer.q_proj.weight)


def test_layers_by_pattern_and_by_number():
    teacher = softmax_model(layers=5)
    by_pattern = student_layers(teacher, "gla, softmax", mixer_options={})
    assert by_pattern == student_layers(teacher, "gla", kept=(1, 3), mixer_options={})
    assert [name for name, _ in by_pattern] == ["gla", "softmax", "gla", "softmax", "gla"]
    assert by_pattern[1][1] == {"heads": 4, "kv_heads": 2}
    student = student_of(teacher, by_pattern)
    assert replaced(student) == [0, 2, 4]
    assert student.config.mixer == "gla, softmax"
    assert student.config.layer_options is None
    for name, weight in teacher.state_dict().items():
        if not name.startswith(("model.layers.0.mixer.", "model.layers.2.mixer.", "model.layers.4.mixer.")):
            assert torch.equal(student.state_dict()[name], weight), name


def test_options_override_those_derived():
    teacher = softmax_model()
    layers = student_layers(teacher, "gla, softmax", mixer_options={"gla": {"key_ratio": 0.5}, "softmax": {"base": 500.0}})
    assert layers[0][1] == {"heads": 4, "key_ratio": 0.5, "value_ratio": 1.0}
    assert layers[1][1] == {"heads": 4, "kv_heads": 2, "base": 500.0}


def test_rotary_positions_are_dropped():
    teacher = softmax_model()
    student = student_of(teacher, student_layers(teacher, "softmax", rotary="drop", mixer_options={}))
    assert all(layer.mixer.rotated == 0 for layer in student.model.layers)
    assert torch.equal(student.model.layers[0].mixer.q_proj.weight, teacher.model.layers[0].mixer.q_proj.weight)


UNIT = ("gated_deltanet", "kda", "deltanet")  # keys of unit length
CONVOLVED = (*UNIT, "mamba2")


@pytest.mark.parametrize("name", [*CONVOLVED, "gla", "lightning", "rwkv7", "retnet", "linear_transformer"])
def test_keys_and_values_are_the_teachers(name):
    """Against the recurrence computed from the teacher's projections."""
    teacher = softmax_model()
    student = student_of(teacher, student_layers(teacher, name, mixer_options={}), context=64)
    mixer, attention = student.model.layers[1].mixer, teacher.model.layers[1].mixer
    x = torch.randn(2, 12, 32)
    with torch.no_grad():
        r = mixer.recurrence(x, mixer.begin(x))
        k, v = (F.linear(x, p.weight).view(2, 12, 2, 8).repeat_interleave(2, 2) for p in (attention.k_proj, attention.v_proj))
    k, v = (F.silu(t * TAP) if name in CONVOLVED else F.silu(t) if name == "lightning" else t for t in (k, v))
    if name == "linear_transformer":
        k = F.elu(k) + 1
    if name in UNIT:
        k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    if name != "retnet":  # it has values twice as wide
        torch.testing.assert_close(r.v, v)
    if name not in ("retnet", "rwkv7"):  # one rotates, the other scales its keys
        torch.testing.assert_close(r.k, k)
    if name in ("gla", "gated_deltanet", "kda", "mamba2", "rwkv7"):
        rates = 64.0 ** (-torch.arange(1, 5) / 4)
        wanted = -rates.clamp(max=0.599).view(*[1] * 2, 4, *[1] * (r.decay.ndim - 3))
        torch.testing.assert_close(r.decay, wanted.expand_as(r.decay), rtol=1e-4, atol=1e-6)
    if r.beta is not None:
        torch.testing.assert_close(r.beta, torch.full_like(r.beta, 0.5))


def test_lifetimes_reach_the_context():
    torch.testing.assert_close(1 / spread(3, 1000), torch.tensor([10.0, 100.0, 1000.0]))


def test_every_causal_mixer_makes_a_student():
    teacher = softmax_model(layers=2)
    for name in mixers.available():
        if mixers.info(name).resumable:
            student = student_of(teacher, student_layers(teacher, name, mixer_options={}))
            with torch.no_grad():
                assert student(IDS).logits.isfinite().all(), name


def test_residual_scales_follow_the_layers():
    teacher = softmax_model(residual_scales={"softmax": [0.9, 0.5]})
    assert config_with(teacher.config, student_layers(teacher, "gla", mixer_options={})).residual_scales == {"gla": [0.9, 0.5]}
    both = config_with(teacher.config, student_layers(teacher, "gla, softmax", mixer_options={}))
    assert both.residual_scales == {"softmax": [0.9, 0.5], "gla": [0.9, 0.5]}


def test_layers_that_differ_are_written_one_by_one():
    config = LMConfig(dim=32, layers=2, mixer="softmax", layer_options=[{"window": 4}, {}])
    assert layers_of(config_with(config, layers_of(config))) == layers_of(config)


@pytest.mark.parametrize("names", ["a*2, b", "a", "a, b, a*3", "a*4, b*2, a"])
def test_patterns_are_written_as_short_as_they_go(names):
    layers = pattern.fill(pattern.parse(names, "mixer"), 2 * len(pattern.parse(names, "mixer")))
    assert written(layers) == names


@pytest.mark.parametrize(
    ("mixer", "kept", "options", "message"),
    [
        ("gla, softmax", (1,), {}, "mixer must not name softmax where keep or keep_layers chooses"),
        ("gla", (0, 3), {}, "keep_layers must be from 0 to 2, but has 3"),
        ("gla", None, {"retnet": {}}, "mixer_options names 'retnet', but the mixers are gla"),
        ("glaa", None, {}, "no mixer is called 'glaa'"),
    ],
)
def test_what_fits_no_layer_is_refused(mixer, kept, options, message):
    with pytest.raises(ValueError, match=message):
        student_layers(softmax_model(), mixer, kept=kept, mixer_options=options)
