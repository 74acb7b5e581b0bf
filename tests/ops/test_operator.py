"""Operators as data: arguments of the backward pass, called directly, through autograd and under tracing."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from linattn.ops import operator
from linattn.ops.operator import Operator, Pass, by_definition
from tests.ops.operators import Seen

SEEN: list[str] = []


def forward(x: Tensor, y: Tensor | None, power: int, keeps: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x ** power, y doubled, and a saved tensor."""
    SEEN.append("forward")
    return x**power, None if y is None else 2 * y, x.square() if keeps else None


def backward(d_one: Tensor, dtwo: Tensor | None, x: Tensor, kept: Tensor, power: int, of_y: bool) -> tuple[Tensor, Tensor | None]:
    SEEN.append(f"backward, y {of_y}, two {dtwo is not None}")
    assert torch.equal(kept, x.square())
    return power * x ** (power - 1) * d_one, 2 * dtwo if of_y and dtwo is not None else None


def outputs(x: Tensor, y: Tensor | None, power: int, keeps: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return torch.empty_like(x), None if y is None else torch.empty_like(y), torch.empty_like(x) if keeps else None


def gradients(d_one: Tensor, dtwo: Tensor | None, x: Tensor, kept: Tensor, power: int, of_y: bool) -> tuple[Tensor, Tensor | None]:
    return torch.empty_like(x), torch.empty_like(dtwo) if of_y and dtwo is not None else None


KERNELS = SimpleNamespace(forward=forward, backward=backward, outputs=outputs, gradients=gradients, refusal=lambda *_: None)
SHARED = {"results": "one two kept", "gradients": "x y", "like": "x", "save_flag": True}
TOY = Operator(
    lambda: KERNELS,
    Pass("(Tensor x, Tensor? y, int power, bool keeps) -> (Tensor, Tensor, Tensor)", "test_toy"),
    Pass("(Tensor d_one, Tensor? dtwo, Tensor x, Tensor kept, int power, bool of_y) -> (Tensor, Tensor)", "test_toy_backward"),
    once="a toy is differentiable once",
    **SHARED,
)
SQUARE = Operator(
    lambda: SimpleNamespace(forward=lambda x, power: x**power, backward=lambda d_y, x, power: (power * x ** (power - 1) * d_y,)),
    Pass("(Tensor x, int power) -> Tensor"),
    Pass("(Tensor d_y, Tensor x, int power) -> Tensor"),
    "y", "x", "x", derivative=by_definition(lambda x, power: x**power),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_seen():
    SEEN.clear()


def leaf() -> Tensor:
    return torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


def test_without_gradients_the_kernels_run_alone():
    one, two, kept = TOY(leaf().detach(), None, 3)
    assert one.tolist() == [1, 8, 27] and two is None and kept is None and one.grad_fn is None


def test_the_backward_pass_gets_what_its_arguments_name():
    x, y = leaf(), leaf()
    one, two, _ = TOY(x, y, 3)
    assert one.grad_fn.name() == "KernelsBackward"
    dx, dy = torch.autograd.grad(one.sum() + two.sum(), (x, y))
    assert dx.tolist() == [3, 12, 27] and dy.tolist() == [2, 2, 2]
    assert SEEN == ["forward", "backward, y True, two True"]


def test_a_missing_first_cotangent_is_zeros_and_other_gradients_are_not_computed():
    x, y = leaf(), leaf().detach()
    _, two, _ = TOY(x, y, 3)
    (dx,) = torch.autograd.grad(two.sum(), x)
    assert not dx.any() and SEEN[-1] == "backward, y False, two True"


def test_under_tracing_it_is_an_operator_of_torch():
    x, y = leaf(), leaf()
    with Seen() as seen:
        one, two, _ = TOY(x, y, 3)
        traced = torch.autograd.grad(one.sum() + two.sum(), (x, y))
    assert set(seen.calls) == {"linattn::test_toy", "linattn::test_toy_backward"}
    assert torch.equal(traced[0], torch.tensor([3.0, 12.0, 27.0])) and torch.equal(traced[1], torch.full((3,), 2.0))
    torch.library.opcheck(TOY.registered[0], (x, None, 3, True), test_utils=("test_schema", "test_faketensor"))


def test_gradients_of_gradients_are_refused_in_its_words():
    x = leaf()
    (dx,) = torch.autograd.grad(TOY(x, None, 3)[0].sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="a toy is differentiable once"):
        dx.sum().backward()


def test_without_saving_there_are_no_gradients():
    with pytest.raises(RuntimeError, match="linattn::test_toy was called without saving for backward"):
        TOY.registered[0](leaf(), None, 3, False)


def test_second_derivatives_by_the_definition():
    x = leaf()
    (dx,) = torch.autograd.grad(SQUARE(x, 2).sum(), x, create_graph=True)
    (again,) = torch.autograd.grad(dx.sum(), x)
    assert again.tolist() == [2, 2, 2]
    y, weights = SQUARE(x, 2), torch.eye(3)
    (together,) = torch.autograd.grad(y, x, weights, is_grads_batched=True)
    assert torch.equal(together, torch.diag(2 * x.detach()))


def test_a_name_that_says_nothing_is_an_error():
    with pytest.raises(ValueError, match="the backward pass takes other, which is neither an argument nor a result"):
        Operator(lambda: KERNELS, Pass("(Tensor x) -> Tensor"), Pass("(Tensor d_y, Tensor other) -> Tensor"), "y", "x", "x")


def test_autocast_lowers_nothing_in_a_backward_pass():
    states = []

    def watched(d_y: Tensor, x: Tensor, power: int) -> tuple[Tensor]:
        states.append(torch.is_autocast_enabled("cpu"))
        return (d_y * x * power,)

    watching = SimpleNamespace(forward=lambda x, power: x**power, backward=watched)
    one = Operator(lambda: watching, SQUARE.forward, SQUARE.backward, "y", "x", "x")
    with torch.autocast("cpu", torch.bfloat16):
        one(leaf(), 2).sum().backward()
    assert states == [False]


def test_one_function_serves_all_kernels():
    assert [f.__name__ for f in vars(operator).values() if isinstance(f, type) and issubclass(f, torch.autograd.Function)] == ["Kernels"]
