"""The captured step against the uncaptured model: tokens and states, for every mixer with a constant-size state."""

import pytest
import torch
from torch import nn

from linattn import mixers
from linattn.generate import captured, stream
from linattn.generate.captured import Choice, step_of
from linattn.generate.prefill import prefill
from linattn.generate.sampling import Sampling, draw, sample
from linattn.models import LanguageModel, LMConfig
from tests.ops.errors import error
from tests.sweeps import swept

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RECURRENT = [n for n in mixers.available() if mixers.info(n).resumable and mixers.info(n).recurrent]


def model(mixer: str = "gla", device: str = "cpu", **options) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LMConfig(**{"vocab_size": 40, "dim": 32, "layers": 2, "mixer": mixer, **options})).to(device).eval()


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Capture steps for any number of tokens."""
    monkeypatch.setattr(captured, "FROM", {"cuda": 1, "cpu": 1})


@pytest.fixture
def never(monkeypatch):
    return lambda: monkeypatch.setattr(captured, "refusal", lambda model: "the test says so")


def greedy(logits):
    return logits.argmax(-1)


def steps(lm, rows: int, count: int, device: str = "cpu"):
    """Compare a captured step with the uncaptured model on the same tokens: errors of logits, and both states."""
    with torch.inference_mode():
        _, state = prefill(lm.model, torch.randint(40, (rows, 7), device=device))
        token = torch.randint(40, (rows,), device=device)
        step = step_of(lm.model, lm.lm_head, state, 100)
        assert not isinstance(step, str), step
        logits, errors = [], []

        def kept(x):
            logits.append(x.clone())
            return greedy(x)

        step.load(step, state, token, torch.zeros_like(token, dtype=torch.bool), Choice(kept, "kept"))
        for _ in range(count):
            step.tokens.copy_(token)
            step.run()
            hidden, state = prefill(lm.model, token[:, None], state)
            wanted = lm.lm_head(hidden)[:, -1]
            errors.append(error(logits[-1].double(), wanted.double()))
            token = greedy(wanted)
    return max(errors), step.state, state


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mixer", swept(RECURRENT))
def test_every_recurrent_mixer(mixer, device):
    off, ours, theirs = steps(model(mixer, device, layers=1), 2, 3, device)
    limit = 2e-5 if device == "cpu" else 1e-4  # tolerance for prefill kernels with split tf32 products
    assert off <= limit
    mine, wanted = ours.layers[0], theirs.layers[0]
    assert list(mine) == list(wanted)
    for name, t in mine.items():
        assert t.dtype == wanted[name].dtype
        if t.is_floating_point():
            assert error(t.double(), wanted[name].double()) <= limit, name
        else:
            assert torch.equal(t, wanted[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("mixer", ["gla", "gated_deltanet", "mamba2"])
def test_other_dtypes(mixer, dtype):
    """In half precision both round between different kernels: the captured step's error against float64 is not larger."""
    lm = model(mixer).to(dtype)
    off, ours, theirs = steps(lm, 2, 3)
    if dtype == torch.float64:
        assert off <= 1e-12 and all(error(a["S"], b["S"]) <= 1e-12 for a, b in zip(ours.layers, theirs.layers, strict=True))
        return
    limit = {torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]  # error of a state from rounding between kernels
    assert all(error(a["S"].double(), b["S"].double()) <= limit for a, b in zip(ours.layers, theirs.layers, strict=True))
    exact = model(mixer).to(dtype).double()
    with torch.inference_mode():
        ids = torch.randint(40, (4, 40))
        _, state = prefill(lm.model, ids)
        _, right = prefill(exact.model, ids)
        step, token, logits = step_of(lm.model, lm.lm_head, state, 100), torch.randint(40, (4,)), []
        step.load(
            step, state, token, torch.zeros_like(token, dtype=torch.bool), Choice(lambda x: logits.append(x.clone()) or greedy(x), "kept")
        )
        captured_off = written_off = 0.0
        for _ in range(8):
            step.tokens.copy_(token)
            step.run()
            (hidden, state), (best, right) = prefill(lm.model, token[:, None], state), prefill(exact.model, token[:, None], right)
            wanted = exact.lm_head(best)[:, -1]
            captured_off += error(logits[-1].double(), wanted)
            written_off += error(lm.lm_head(hidden)[:, -1].double(), wanted)
            token = greedy(wanted)
    assert captured_off <= 1.5 * written_off


YARN = {
    "rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "attention_factor": 1.2, "original_max_position_embeddings": 16,
}  # fmt: skip


@pytest.mark.parametrize("options", [
    {"block": "post"}, {"norm": "layer"}, {"norm": "zero_centered_rms"}, {"tie_embeddings": True, "embedding_norm": True},
    {"ffn": "geglu"}, {"mixer": "gla, gla, mamba2", "layers": 3},
    {"mixer": "softmax, gla", "mixer_options": {"softmax": {"window": 4}}}, {"block": "sandwich"},
    {"mixer": "softmax, gla", "mixer_options": {"softmax": {"norm_eps": 1e-6, "norm": "rms", "scale": 0.3, "scaling": YARN}}},
])  # fmt: skip
def test_other_models(options):
    off, _, _ = steps(model(**options), 2, 4)
    assert off <= 2e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [None, 3])
@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 0.7, "top_k": 9, "top_p": 0.9}])
def test_the_tokens_are_the_same(how, rows, device, never):
    lm = model("gla, gated_deltanet", device)
    ids = torch.randint(40, (6,) if rows is None else (rows, 6))

    def run():
        generator = torch.Generator(device).manual_seed(3)
        tokens = stream(lm, ids, max_new_tokens=20, generator=generator, **how)
        return [t if rows is None else t.tolist() for t in tokens], tokens

    got, tokens = run()
    assert tokens.how.startswith("by a captured step")
    never()
    wanted, written = run()
    assert written.how == "as the model is written: the test says so"
    assert got == wanted
    for mine, theirs in zip(tokens.state.layers, written.state.layers, strict=True):
        assert torch.equal(mine["position"], theirs["position"]) and error(mine["S"].double(), theirs["S"].double()) <= 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_stops_and_states_on_the_way(device, never):
    lm, ids = model("gla", device), torch.randint(40, (3, 5))
    whole = torch.stack(list(stream(lm, ids, max_new_tokens=16, temperature=0)), 1)
    stop = whole[0, 6].item()

    def run():
        tokens = stream(lm, ids, max_new_tokens=16, temperature=0, stop=[stop, 99])
        first = [next(tokens).tolist() for _ in range(5)]
        position = tokens.state.position.tolist()  # reading it does not change it
        return first + [t.tolist() for t in tokens], position, tokens.state.position.tolist(), tokens

    *got, tokens = run()
    assert tokens.nbytes == tokens.state.nbytes
    never()
    *wanted, _ = run()
    assert got == wanted


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mixer", ["gated_deltanet", "gla, softmax"])
@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 0.7, "top_k": 9}])
def test_interleaved_streams_have_a_step_each(mixer, how, device, never, monkeypatch):
    """The graph is traced once for both; a third stream takes over the step of one that has ended."""
    traced, make = [], captured.make_step_graph
    monkeypatch.setattr(captured, "make_step_graph", lambda *args: traced.append(args) or make(*args))
    lm, prompts = model(mixer, device), torch.randint(40, (3, 6)).tolist()

    def streams(prompts):
        return [stream(lm, p, max_new_tokens=12, generator=torch.Generator(device).manual_seed(i), **how) for i, p in enumerate(prompts)]

    one, two = streams(prompts[:2])
    got = list(zip(one, two, strict=True))
    assert [tokens.how.startswith("by a captured step") for tokens in (one, two)] == [True, True]
    assert one._step is not two._step and len(traced) == 1
    last, step = streams(prompts)[2], one._step
    got_last = list(last)
    assert last._step is step and one._step is None and len(traced) == 1
    assert [tokens.state.position.tolist() for tokens in (one, two, last)] == [[18]] * 3
    never()
    assert [*map(list, zip(*got, strict=True)), got_last] == [list(tokens) for tokens in streams(prompts)]


def test_a_step_taken_by_another_thread_is_replaced(never):
    """Two threads can be given one step: its first user captures again."""
    lm, prompt = model("gated_deltanet"), torch.randint(40, (6,)).tolist()
    tokens = stream(lm, prompt, max_new_tokens=12, temperature=0)
    got = [next(tokens) for _ in range(4)]
    tokens.give_up()
    assert "another generation took" in tokens.how
    got += list(tokens)
    assert "by a captured step" in tokens.how
    never()
    assert got == list(stream(lm, prompt, max_new_tokens=12, temperature=0))


def test_a_step_is_made_once_and_again_for_other_weights(monkeypatch):
    monkeypatch.setattr(captured, "KEPT", 2)
    lm, ids = model("gla"), torch.randint(40, (6,))

    def step():
        tokens = stream(lm, ids, max_new_tokens=5, temperature=0)
        out = list(tokens)
        return tokens._step, out

    first, _ = step()
    assert first is not None and step()[0] is first
    with torch.no_grad():
        lm.model.layers[0].mixer.q_proj.weight.mul_(3)
    second, out = step()
    assert second is not first
    with torch.no_grad():
        wanted = ids[None]
        for _ in range(5):
            wanted = torch.cat([wanted, lm(wanted)[:, -1:].argmax(-1)], 1)
    assert out == wanted[0, 6:].tolist()
    other = stream(lm, torch.randint(40, (2, 6)), max_new_tokens=5)
    list(other)
    assert other._step not in (None, first, second) and len(captured._steps[lm.model]) == captured.KEPT


@pytest.mark.parametrize("mixer", ["gated_deltanet", "rwkv4", "kda", "rwkv6"])
def test_what_was_computed_from_weights_is_so_again(mixer):
    """Writes to ``data`` change no version."""
    lm, ids = model(mixer), torch.randint(40, (5,))

    def written():
        return list(stream(lm, ids, max_new_tokens=12, temperature=0))

    written()
    ((_, first),) = captured._steps[lm.model]
    for parameter in lm.parameters():
        parameter.data.add_(torch.randn_like(parameter))
    wanted = ids[None]
    with torch.no_grad():
        for _ in range(12):
            wanted = torch.cat([wanted, lm(wanted)[:, -1:].argmax(-1)], 1)
    assert written() == wanted[0, 5:].tolist()
    ((_, second),) = captured._steps[lm.model]
    assert written() == wanted[0, 5:].tolist()
    assert second is not first and [step for _, step in captured._steps[lm.model]] == [second]


class Adapted(nn.Linear):
    """As in PEFT, an adapter's scale is not a weight."""

    disable_adapters, active_adapters, merged_adapters = False, ("default",), ()
    scaling = 1.0

    def forward(self, x):
        return super().forward(x) * (1 if self.disable_adapters else 1 - 3 * self.scaling) * (-1 if self.training else 1)


@pytest.mark.parametrize("change", [{"disable_adapters": True}, {"scaling": 0.1}, {"training": True}])
def test_a_step_is_not_made_for_other_settings(change):
    lm, ids = model("gla"), torch.randint(40, (6,))
    projection = lm.model.layers[0].mixer.q_proj
    projection.__class__ = Adapted

    def written(**settings):
        vars(projection).update(settings)
        return list(stream(lm, ids, max_new_tokens=12, temperature=0))

    def wanted():
        text = ids[None]
        with torch.no_grad():
            for _ in range(12):
                text = torch.cat([text, lm(text)[:, -1:].argmax(-1)], 1)
        return text[0, 6:].tolist()

    first = written()
    assert first == wanted()
    second = written(**change)
    assert second == wanted() != first
    assert len(captured._steps[lm.model]) == 2


class Accumulating(nn.Linear):
    """Writes in place to its own results, as PEFT's OFT does, and through a view."""

    def forward(self, x):
        turn, total = torch.eye(self.in_features), torch.zeros(2, self.out_features)
        turn.add_(self.weight[:1], alpha=0.5)
        total[0] += 0.1
        torch._foreach_add_([total], 0.2)
        return super().forward(x @ turn) + total[0]


def test_what_is_written_to_begins_anew_in_every_step(never):
    """A graph would create it only once, so such a model decodes uncaptured."""
    lm, ids = model("gla"), torch.randint(40, (6,))
    lm.model.layers[0].mixer.q_proj.__class__ = Accumulating
    tokens = stream(lm, ids, max_new_tokens=12, temperature=0)
    got = list(tokens)
    assert "writes into a tensor" in tokens.how
    never()
    assert got == list(stream(lm, ids, max_new_tokens=12, temperature=0))


class Sync(nn.Module):
    """Reads a value, which cannot be traced."""

    def forward(self, x):
        return x * 2 if bool(x.sum() > 0) else x


def test_what_is_not_captured_and_why():
    def how(lm, count=6, **options):
        tokens = stream(lm, [1, 2, 3], max_new_tokens=count, temperature=0, **options)
        list(tokens)
        return tokens.how

    assert "the state of layer 1 grows, its 'k'" in how(model("gla, topk"))
    lm = model()
    for name in ("model.layers.1", "lm_head"):
        handle = lm.get_submodule(name).register_forward_hook(lambda *_: None)
        assert f"{name} has hooks" in how(lm)
        handle.remove()
    lm.lm_head.forward = lambda x: -nn.functional.linear(x, lm.lm_head.weight)
    assert "lm_head has hooks or a replaced forward" in how(lm)
    del lm.lm_head.forward
    lm.model.norm = nn.Sequential(lm.model.norm, Sync())
    assert "cannot be traced" in how(lm)
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in how(model())


def test_few_tokens_are_not_worth_it(monkeypatch):
    monkeypatch.setattr(captured, "FROM", {"cpu": 10})
    tokens = stream(model(), [1, 2, 3], max_new_tokens=10, temperature=0)
    list(tokens)
    assert "9 tokens are too few to repay capturing a step: 10 are needed" in tokens.how


def test_draws_are_those_of_multinomial():
    p = torch.rand(5, 30).softmax(-1)
    for seed in range(20):
        a, b = (torch.Generator().manual_seed(seed) for _ in range(2))
        assert torch.equal(draw(p, a), torch.multinomial(p, 1, generator=b)[:, 0])
    assert draw(torch.tensor([[0.0, 1.0, 0.0]])).item() == 1


def test_a_choice_is_equal_where_it_chooses_equally():
    generator = torch.Generator()
    one, two = (Choice(lambda x: x, Sampling(0.5), generator) for _ in range(2))
    assert one == two != Choice(sample, Sampling(0.6), generator)
    assert one != Choice(one.choose, Sampling(0.5), torch.Generator())
