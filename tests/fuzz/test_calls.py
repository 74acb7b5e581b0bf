"""Any call of a public function ends in a result or in a one-line error that names the argument.

``python -m benchmarks.fuzz_calls`` makes many more of these calls.
"""

import contextlib
import io

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import linattn
from linattn.arguments import check_fields, described, mismatch, typed, whole
from tests.fuzz.calls import TARGETS, calls
from tests.fuzz.outcome import complaint

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of the prototypes of layouts that are tried


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_calls(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write to any given name

    @settings(max_examples=25, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(calls((name,)))
    def run(case):
        _, call, arguments = case
        with contextlib.redirect_stdout(io.StringIO()):
            _, wrong = complaint(call, arguments)
        assert wrong is None, f"{wrong}\n{arguments}"

    run()


def test_the_judge():
    """The criterion detects bad outcomes."""

    def deep(x):
        return x + torch.ones(3)

    assert complaint(deep, {"x": torch.ones(3)}) == ("result", None)
    assert "no error of ours" in complaint(deep, {"x": torch.ones(2)})[1]
    assert "not raised by us" in complaint(len, {})[1]
    assert complaint(whole, {"name": "x", "value": -1, "low": 0}) == ("refused", None)


@typed
def function(
    a: int, b: "torch.Tensor | None" = None, *rest: int, c: "str | dict[str, int]" = "", d: "tuple[int, ...]" = (), e: object = None
):
    return a


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"a": 1}, None),
        ({"a": np.int64(1), "b": None, "c": {"x": 1}, "d": [1, 2], "e": len}, None),
        ({"a": True}, "a must be an integer, but came as True"),
        ({"a": 1.5}, "a must be an integer, but came as 1.5"),
        ({"a": 1, "c": 3}, "c must be a string or a dict, but came as 3"),
        ({"a": 1, "d": [1, "x"]}, "d must be a list of integers, but came as [1, 'x']"),
        ({"a": torch.ones(2)}, "a must be an integer, but came as a tensor of torch.float32 [2]"),
    ],
)
def test_typed(arguments, says):
    if says is None:
        return function(**arguments)
    with pytest.raises(TypeError) as error:
        function(**arguments)
    assert str(error.value) == says
    return None


def test_nan_is_no_number():
    assert mismatch("x", float("nan"), "float | None", {}) == "x must be a number or None, but came as nan"
    assert mismatch("x", float("inf"), "float", {}) is None


def test_what_came_is_told_on_one_line():
    assert described("a\nb") == "'a\\nb'"
    assert described(torch.ones(2, 3)) == "a tensor of torch.float32 [2, 3]"
    assert described(list(range(1000))) == "a list"
    assert described(object()) == "a object"


def test_what_longer_runs_found(tmp_path):
    from linattn.data import prepare
    from linattn.generate import prefill
    from linattn.models import LanguageModel, LMConfig
    from linattn.state import PrefixStore, State

    with pytest.raises(ValueError, match=r"^description must be JSON values"):
        State([]).save(tmp_path / "s", description={"loss": float("nan")})
    with pytest.raises(TypeError, match=r"^folder must be a path, but came as '\\x00'$"):
        PrefixStore("\0")
    model = LanguageModel(LMConfig(vocab_size=5, dim=32, layers=1)).model
    with pytest.raises(ValueError, match="^mask must be a dense tensor"):
        prefill(model, torch.ones(1, 3, dtype=torch.long), mask=torch.ones(1, 3, dtype=torch.bool).to_sparse())
    State([]).save(tmp_path / "s")
    with pytest.raises(ValueError, match="cannot be compared: description must be JSON values"):
        State.load(tmp_path / "s", description={"a": b"x"})
    for call in (State([]).save, State.load):
        with pytest.raises(ValueError, match="model must be a model or the identity of one, but came as {'a': 1}"):
            call(tmp_path / "s", model={"a": 1})
    with pytest.raises(ValueError, match="no feed-forward is called array"):
        linattn.ffn.create(np.ones(3), 32)
    with pytest.raises(ValueError, match="^out must be a folder with a name, but came as ''"):
        prepare([str(tmp_path)], "")


@pytest.mark.parametrize("layout", [{}, {"cu_seqlens": torch.tensor([0, 3])}], ids=["dense", "packed"])
@pytest.mark.parametrize("name", ["h3", "gated_deltanet"])
def test_what_longer_runs_found_of_states(name, layout):
    mixer, x = linattn.mixers.create(name, dim=32), torch.ones(1, 3, 32)
    state = mixer(x, return_state=True)[1]
    for key in (key for key, t in state.items() if t.ndim == 3):
        with pytest.raises(ValueError, match=f"^state must have '{key}' of .* tokens, but it came with 5"):
            mixer(x, {**state, key: torch.ones(1, 5, state[key].shape[-1])}, **layout)


def test_what_longer_runs_found_of_pools():
    from linattn.generate import Pool
    from linattn.models import LanguageModel, LMConfig

    model = LanguageModel(LMConfig(vocab_size=5, dim=32, layers=1)).eval()
    with pytest.raises(ValueError, match="^slots must be an integer from 1 to 2147483647, but came as 10"):
        Pool(model, slots=10**30)
    with pytest.raises(ValueError, match="^slots = 2,000,000,000 states of .* need at least .* of memory"):
        Pool(model, slots=2 * 10**9)
    with pytest.raises(ValueError, match="^seed must be from 0 .* but came as True"):
        Pool(model, slots=1).submit([1], max_new_tokens=1, seed=True)
    hybrid = LanguageModel(LMConfig(vocab_size=5, dim=32, layers=1, mixer="softmax")).eval()
    with pytest.raises(ValueError, match="^ids and max_new_tokens make 4 tokens, but a layer keeps every token and context is 3"):
        Pool(hybrid, slots=1, context=3).submit([1], max_new_tokens=3)


def test_a_base_beyond_64_bits():
    assert linattn.cost("softmax", dim=32, base=10**30, tokens=4, batch=1).parameters > 0


def test_fields():
    from linattn.train import TrainOptions

    with pytest.raises(ValueError, match=r"^steps must be an integer, but came as '4'$"):
        check_fields(TrainOptions(steps="4"))
