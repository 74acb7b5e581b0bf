"""Step operators equal their in-place functions, and overwrite a state only if nothing else reads it."""

import pytest
import torch
import torch.nn.functional as F

import linattn
from linattn.generate.prefill import prefill
from linattn.generate.step_graph import make_step_graph
from linattn.models import LanguageModel, LMConfig
from linattn.ops import convolution_step, one_query, recurrence, steps, tracing
from linattn.state import State
from tests.ops.errors import error


def recurrent(rows=2, **more):
    """Arguments of the step operator of the recurrence."""
    q, k = torch.randn(2, rows, 1, 2, 8)
    v, state = torch.randn(rows, 1, 4, 8), torch.randn(rows, 4, 8, 8)
    given = {"decay": -torch.rand(rows, 1, 4), "beta": torch.rand(rows, 1, 4), "initial_z": None, "normalized": False, **more}
    return (q, k, v, given["decay"], given["beta"], None, None, None, state, given["initial_z"], None, 0.5, given["normalized"])


CALLS = {
    "recurrent_step": recurrent,
    "recurrent_step with a denominator": lambda: recurrent(beta=None, initial_z=torch.rand(2, 4, 8), normalized=True),
    "convolution_step": lambda: (torch.randn(2, 1, 8), torch.randn(2, 3, 8), torch.randn(8, 1, 4), torch.randn(8), True),
    "append": lambda: (torch.randn(2, 6, 3), torch.tensor([4]), torch.randn(2, 1, 3)),
}


@pytest.mark.parametrize("what", CALLS)
def test_a_step_operator_is_its_step_in_place(what):
    operator = getattr(torch.ops.linattn, what.split()[0]).default
    arguments = CALLS[what]()
    step, names = steps.STEPS[operator], [a.name for a in operator._schema.arguments]
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
    found = operator(*(t.clone() if isinstance(t, torch.Tensor) else t for t in arguments))
    results = dict(zip((r.name for r in operator._schema.returns), found if isinstance(found, tuple) else (found,), strict=True))
    rest = step.in_place(*arguments)
    rest = list(rest) if isinstance(rest, tuple) else [rest]
    for name, t in results.items():
        if name in step.carried.values():
            (state,) = (old for old, new in step.carried.items() if new == name)
            written = arguments[names.index(state)]
        else:
            written = rest.pop(0)
        assert (written is None) == (t.numel() == 0)
        assert written is None or error(written, t) <= 1e-6


@pytest.mark.parametrize(("mixer", "wanted"), [
    ("gla", {recurrence.step_}), ("gated_deltanet", {recurrence.step_, convolution_step.step_}), ("softmax", {one_query.append_}),
])  # fmt: skip
def test_models_emit_them(mixer, wanted):
    """All states are updated in place, without a separate next state."""
    from linattn.generate import capacity

    lm = LanguageModel(LMConfig(vocab_size=40, dim=32, layers=2, mixer=mixer)).eval()
    with torch.no_grad():
        state = prefill(lm.model, torch.randint(40, (2, 7)))[1]
        state = capacity.preallocated(state, capacity.slots_of(lm.model), 16)
        names, leaves = [list(layer) for layer in state.layers], [t for layer in state.layers for t in layer.values()]

        def step(token, *leaves):
            rest = iter(leaves)
            hidden, new = lm.model(token[:, None], State([{name: next(rest) for name in layer} for layer in names]), return_state=True)
            return [hidden, *(layer[name] for layer, own in zip(new.layers, names, strict=True) for name in own)]

        module = make_step_graph(step, [torch.zeros(2, dtype=torch.int64), *leaves])
    targets = {node.target for node in module.graph.nodes if node.op == "call_function"}
    assert wanted <= targets and not targets & set(steps.STEPS)
    (outputs,) = next(node for node in module.graph.nodes if node.op == "output").args
    assert all(node.op == "placeholder" for node in outputs[1:])


def test_a_state_that_something_else_reads_is_not_overwritten():
    x, state, weight = torch.randn(2, 1, 8), torch.randn(2, 3, 8), torch.randn(8, 1, 4)

    def step(x, state):
        y, after = convolution_step.step(x, state, weight, None, False)
        return [y + state.sum(1, keepdim=True), after]

    module = make_step_graph(step, [x, state.clone()])
    given = state.clone()
    y, after = module(x, given)
    assert torch.equal(given, state)
    tokens = torch.cat([state, x], 1)
    wanted = F.conv1d(tokens.mT, weight, groups=8).mT
    assert error(y, wanted + state.sum(1, keepdim=True)) <= 1e-6
    assert torch.equal(after, tokens[:, 1:])


def test_two_steps_from_one_state_leave_it():
    q, k, v, decay, *_, state, _, _, scale, _ = recurrent()

    def twice(q, k, v, decay, state):
        one, after = linattn.linear_attention(q, k, v, decay=decay, scale=scale, initial_state=state, return_state=True)
        two, _ = linattn.linear_attention(k, q, v, decay=decay, scale=scale, initial_state=state, return_state=True)
        return [one + two, after]

    with torch.no_grad():
        wanted = twice(q, k, v, decay, state)
        given = [t.clone() for t in (q, k, v, decay, state)]
        for mine, theirs in zip(make_step_graph(twice, given)(*given), wanted, strict=True):
            assert error(mine, theirs) <= 1e-6
    assert torch.equal(given[-1], state)


def test_only_a_recorded_step_has_them():
    assert not tracing.recording_step()
    with tracing.step_recorded():
        assert tracing.recording_step()
    assert not tracing.recording_step()
    state = torch.randn(2, 3, 8)
    assert one_query.append(state, torch.tensor([1]), state[:, :1]).shape == state.shape
