"""The base class of mixers: layouts, dtypes, float32 time constants, refused states, the form."""

import copy

import pytest
import torch
from torch import nn

import linattn
from linattn.mixers import CallContext, create

RESUMABLE = [name for name in linattn.mixers.available() if linattn.mixers.info(name).resumable]


class Decayed(linattn.Mixer):
    """A third party's mixer in twenty lines, with its own state: the sum of all tokens is added to the output gate."""

    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__(dim)
        self.heads = heads
        self.qkv, self.decay, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, heads), nn.Linear(dim, dim)

    def project(self, x, call):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        seen = x.sum(1) if call.fresh else call.get("sum") + x.sum(1)
        return linattn.Recurrence(q, k, v, decay=nn.functional.logsigmoid(self.decay(x).float())), {"sum": seen}

    def read(self, o, x):
        return self.out(o.flatten(-2))


class Bare(Decayed):
    """The same with a bare recurrence."""

    def project(self, x, call):
        return super().project(x, call)[0]


def test_a_third_party_needs_nothing_else():
    mixer, x = Decayed(32), torch.randn(2, 7, 32)
    y, state = mixer(x[:, :4], return_state=True)
    z, state = mixer(x[:, 4:], state, return_state=True)
    torch.testing.assert_close(torch.cat([y, z], 1), mixer(x))
    torch.testing.assert_close(state["sum"], x.sum(1))
    assert sorted(state) == ["S", "position", "sum"]
    bare = Bare(32)
    bare.load_state_dict(mixer.state_dict())
    torch.testing.assert_close(bare(x), mixer(x), rtol=0, atol=0)
    assert sorted(bare(x, return_state=True)[1]) == ["S", "position"]


class Constant(nn.Module):
    """A mixer inside a model, with a gradient on its time constants."""

    def __init__(self, dtype=None):
        super().__init__()
        self.mixer = create("mamba2", dim=32)
        self.mixer(torch.randn(1, 3, 32)).sum().backward()


@pytest.mark.parametrize("convert", [nn.Module.bfloat16, nn.Module.half, lambda m: m.to("cpu", torch.bfloat16)])
def test_time_constants_stay_float32(convert):
    model = Constant()
    A_log, grad = model.mixer.A_log.detach().clone(), model.mixer.A_log.grad.clone()
    mixer = convert(model).mixer
    assert mixer.in_proj.weight.dtype in (torch.bfloat16, torch.float16)
    assert mixer.A_log.dtype == mixer.dt_bias.dtype == mixer.A_log.grad.dtype == torch.float32
    torch.testing.assert_close(mixer.A_log.detach(), A_log, rtol=0, atol=0)  # no bit was lost on the way
    torch.testing.assert_close(mixer.A_log.grad, grad, rtol=0, atol=0)
    assert not dict(mixer.named_buffers())


def test_time_constants_become_float64_and_come_back():
    mixer = Constant().double().mixer
    assert mixer.A_log.dtype == torch.float64
    assert mixer.bfloat16().A_log.dtype == torch.float32


def test_time_constants_are_float32_under_a_half_default(monkeypatch):
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        mixers = [create(name, dim=32) for name in ("mamba2", "gated_deltanet")]
    finally:
        torch.set_default_dtype(before)
    assert all(m.A_log.dtype == m.dt_bias.dtype == torch.float32 for m in mixers)


@pytest.mark.parametrize("name", ["gla", "mamba2", "gated_deltanet", "retnet", "rwkv7", "comba"])
def test_gate_logs_are_float32(name):
    """In a bfloat16 model and under autocast; q, k, v and erasing vectors have low precision, as the fast kernels require."""
    x = torch.randn(1, 5, 32)
    low = create(name, dim=32).bfloat16()
    r = low.recurrence(x.bfloat16(), CallContext(x))
    assert r.decay.dtype == torch.float32 and {t.dtype for t in (r.q, r.k, r.v, *(r.erase or ()))} == {torch.bfloat16}
    with torch.autocast("cpu", torch.bfloat16):
        r = create(name, dim=32).recurrence(x, CallContext(x))
    assert r.decay.dtype == torch.float32 and {t.dtype for t in (r.q, r.k, r.v, *(r.erase or ()))} == {torch.bfloat16}


def test_autocast_leaves_float64_alone():
    mixer, x = create("gla", dim=32).double(), torch.randn(1, 5, 32, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        y = mixer(x)
    torch.testing.assert_close(y, mixer(x), rtol=0, atol=0)


@pytest.mark.parametrize("form", ["parallel", "chunk", "recurrent"])
def test_form_is_handed_to_the_op(form, monkeypatch):
    asked = []
    real = linattn.mixers.base.linear_attention
    monkeypatch.setattr(linattn.mixers.base, "linear_attention", lambda *a, **k: asked.append(k["form"]) or real(*a, **k))
    mixer = create("gla", dim=32)
    mixer(torch.randn(1, 5, 32))
    mixer.form = form
    mixer(torch.randn(1, 5, 32))
    assert asked == ["auto", form]


def test_what_stands_in_padding_does_not_matter():
    """Not even NaN affects outputs, gradients or the state."""
    x, mask = torch.randn(2, 8, 32), torch.tensor([[1, 0, 1, 1, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1, 1, 1]]).bool()
    broken = torch.where(mask[..., None], x, torch.nan)
    for name in RESUMABLE:
        mixer, runs = create(name, dim=32), []
        for tokens in (x, broken):
            y, state = mixer(tokens, mask=mask, return_state=True)
            loss = y.sum() + sum(t.sum() for t in state.values() if t.is_floating_point())
            runs.append([y, *state.values(), *torch.autograd.grad(loss, list(mixer.parameters()), materialize_grads=True)])
        assert not runs[0][0][~mask].any()
        for clean, dirty in zip(*runs, strict=True):
            torch.testing.assert_close(dirty, clean, rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}")


def test_numbers_of_real_tokens_are_a_mask():
    x, count = torch.randn(2, 8, 32), torch.tensor([5, 8])
    mask = torch.arange(8) < count[:, None]
    broken = torch.where(mask[..., None], x, torch.nan)
    for name in RESUMABLE:
        mixer = create(name, dim=32)
        (y, state), (z, same) = (mixer(tokens, mask=m, return_state=True) for tokens, m in ((x, mask), (broken, count)))
        for masked, counted in zip((y, *state.values()), (z, *same.values()), strict=True):
            torch.testing.assert_close(counted, masked, rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}")


def test_packed_lengths_may_be_int32():
    x, cu = torch.randn(1, 9, 32), torch.tensor([0, 4, 4, 9])
    for name in RESUMABLE:
        mixer = create(name, dim=32)
        (y, state), (z, same) = (mixer(x, cu_seqlens=c, return_state=True) for c in (cu, cu.int()))
        for long, short in zip((y, *state.values()), (z, *same.values()), strict=True):
            torch.testing.assert_close(short, long, rtol=0, atol=0)
        torch.testing.assert_close(mixer(x, same, cu_seqlens=cu.int()), mixer(x, state, cu_seqlens=cu), rtol=0, atol=0)


@pytest.mark.parametrize("call", ["x", "width", "mask", "mask dtype", "both", "rows", "other"])
def test_refusals(call):
    mixer, x = create("gla", dim=32), torch.zeros(2, 4, 32)
    _, state = mixer(x, return_state=True)
    mask = torch.ones(2, 4, dtype=torch.bool)
    calls = {
        "x": (lambda: mixer(x[0]), r"x must have shape \[B, T, D\] with D = 32, but came with \[4, 32\]"),
        "width": (lambda: mixer(x[..., :31]), r"D = 32, but came with \[2, 4, 31\]"),
        "mask": (lambda: mixer(x, mask=mask[:, :3]), r"mask must be torch.bool of shape \[B, T\] = \[2, 4\], but came as .* \[2, 3\]"),
        "mask dtype": (lambda: mixer(x, mask=mask.long()), "came as torch.int64"),
        "both": (lambda: mixer(x, mask=mask, cu_seqlens=torch.tensor([0, 4])), "mask and cu_seqlens exclude each other"),
        "rows": (lambda: mixer(x[:1], state), "state must have one row a sequence, 1 here, but came with 2"),
        "other": (lambda: create("softmax", dim=32)(x, state), "state has no 'k', only S, position: is it another mixer's"),
    }
    run, message = calls[call]
    with pytest.raises(ValueError, match=message):
        run()


def test_a_mixer_without_its_two_functions_says_so():
    with pytest.raises(NotImplementedError, match=r"must implement project\(x, call\)"):
        linattn.Mixer(32)(torch.zeros(1, 2, 32))


def test_no_state_is_made_that_nobody_wants():
    x = torch.randn(1, 4, 32)
    call = CallContext(x, returning=False)
    create("deltanet", dim=32).mix(x, call)
    assert call.new == {}


def test_a_copy_is_its_own():
    mixer = create("mamba2", dim=32)
    twin = copy.deepcopy(mixer).bfloat16()
    assert mixer.in_proj.weight.dtype == torch.float32 and twin.A_log.dtype == torch.float32


@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
@pytest.mark.parametrize("name", ["comba", "gated_deltanet2", "precond_gated_deltanet", "rwkv7"])
def test_what_is_erased_has_the_dtype_of_keys(name: str, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise portable kernels would run in place of Hopper's."""
    seen: list[torch.dtype] = []

    def spy(*tensors: torch.Tensor, erase: tuple[torch.Tensor, torch.Tensor], **options: object) -> object:
        seen.extend(t.dtype for t in (*tensors, *erase))
        return linattn.linear_attention(*tensors, erase=erase, **options)

    monkeypatch.setattr("linattn.mixers.base.linear_attention", spy)
    mixer = create(name, dim=64)
    x = torch.randn(1, 5, 64)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        mixer(x) if autocast else mixer.bfloat16()(x.bfloat16())
    assert seen == 5 * [torch.bfloat16]
