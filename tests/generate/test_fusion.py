"""Random step graphs, fused as for either device, against the modules that they were traced from."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn import mixers
from linattn.generate import fusion, step_graph
from linattn.generate.prefill import prefill
from linattn.generate.program import Program
from linattn.models import LanguageModel, LMConfig
from linattn.ops import convolution_step
from linattn.ops.norms import unit_length
from linattn.state import State
from tests.ops.errors import error
from tests.sweeps import first

LIMIT = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 0.2}  # values cancel here and there
RECURRENT = [n for n in mixers.available() if mixers.info(n).resumable and mixers.info(n).recurrent]
FIRST = first(RECURRENT)


def _case(mixer, rows, layers):
    """With two rows, whose products differ, and a second layer after the residuals of the first. Quick for one mixer of each folder."""
    return pytest.param(mixer, rows, layers, marks=() if mixer in FIRST else pytest.mark.slow)


UNARY = (F.logsigmoid, F.softplus, torch.sigmoid, torch.tanh, torch.neg, F.silu, lambda x: x.clamp(max=3).exp())


class Graph(nn.Module):
    """About ten random operations on earlier values: linear maps, gated pairs, norms, sums, and elementwise operations after products."""

    def __init__(self, seed: int, dtype: torch.dtype):
        super().__init__()
        torch.manual_seed(seed)
        self.random, self.dtype = random.Random(seed), dtype
        self.width = self.random.choice([8, 16, 24])
        self.maps, self.vectors = nn.ModuleList(), nn.ParameterList()
        self.steps, self.sizes = [], [self.width]
        for _ in range(self.random.randint(3, 14)):
            i = self.random.randrange(max(0, len(self.sizes) - 4), len(self.sizes))
            kind = self.random.choice(
                [self.linear] * 4 + [self.narrow, self.gated, self.sum, self.norm, self.heads, self.single, self.vector]
            )
            self.steps.append((i, *kind(i, self.sizes[i])))
        self.results = sorted({len(self.sizes) - 1, *(self.random.randrange(len(self.sizes)) for _ in range(self.random.randint(0, 3)))})
        self.to(dtype)

    def forward(self, x: Tensor) -> list[Tensor]:
        values = [x]
        for i, step, *others in self.steps:
            values.append(step(values[i], *(values[j] for j in others)))
        return [values[i].clone() for i in self.results]

    def map(self, inputs, outputs, bias):
        self.maps.append(nn.Linear(inputs, outputs, bias=self.random.random() < bias))
        return self.maps[-1]

    def linear(self, i, n):
        f = self.map(n, self.random.choice([n, self.width, 8, 16, 5]), 0.4)
        self.sizes.append(f.out_features)
        return (lambda x: f(x.to(self.dtype)),)

    def narrow(self, i, n):
        f, g = self.map(n, 4, 0.2), self.map(4, self.random.choice([self.width, 8]), 0.5)
        self.sizes.append(g.out_features)
        return (lambda x: g(f(x.to(self.dtype))),)

    def gated(self, i, n):
        f = self.map(n, self.random.choice([self.width, 16]), 0.4)
        g = self.map(n, f.out_features, 0.4)
        self.sizes.append(f.out_features)
        if self.random.random() < 0.5:
            return (lambda x: F.silu(f(x.to(self.dtype))) * g(x.to(self.dtype)),)
        return (lambda x: g(x.to(self.dtype)) * F.silu(f(x.to(self.dtype))),)

    def sum(self, i, n):
        self.sizes.append(n)
        other = self.random.choice([j for j, size in enumerate(self.sizes[:-1]) if size == n])
        return self.random.choice([torch.add, torch.add, torch.mul]), other

    def norm(self, i, n):
        self.sizes.append(n)
        self.vectors.append(nn.Parameter(torch.randn(n)))
        weight = self.vectors[-1] if self.random.random() < 0.8 else None
        return (lambda x: F.rms_norm(x.to(self.dtype), (n,), weight, 1e-5),)

    def heads(self, i, n):
        self.sizes.append(n)
        return (lambda x: F.rms_norm(x.unflatten(-1, (-1, n // (2 - n % 2))), (n // (2 - n % 2),), None, 1e-5).flatten(-2),)

    def single(self, i, n):
        self.sizes.append(n)
        f, wide = self.random.choice(UNARY), self.random.random() < 0.6
        return (lambda x: f(x.float() if wide and self.dtype != torch.float64 else x),)

    def vector(self, i, n):
        self.sizes.append(n)
        self.vectors.append(nn.Parameter(torch.rand(n) + 0.5))
        c, f, number = self.vectors[-1], self.random.choice([torch.add, torch.mul, torch.div]), self.random.random() < 0.4
        wide = self.dtype if self.dtype == torch.float64 else torch.float32
        return (lambda x: f(x, 2.5) if number else f(x.to(wide), c.to(wide)),)


@pytest.mark.parametrize("as_for_a_gpu", [False, True])
@pytest.mark.parametrize("seed", [pytest.param(n, marks=pytest.mark.slow if n >= 40 else ()) for n in range(80)])
def test_random_graphs(seed, as_for_a_gpu, monkeypatch):
    dtype = [torch.float32, torch.float32, torch.bfloat16, torch.float64][seed % 4]
    module = Graph(seed, dtype).eval()
    xs = [torch.randn(1 + 2 * (seed % 3 == 0), 1, module.width).to(dtype) for _ in range(3)]
    with torch.no_grad():
        wanted = [module(x) for x in xs]
        if as_for_a_gpu:
            monkeypatch.setattr(fusion, "on_gpu", lambda t: True)
        traced = step_graph.make_step_graph(module, [xs[0].clone()])
        got = [traced(x) for x in xs]
        if not as_for_a_gpu:
            place = xs[0].clone()
            program = Program(traced, [place])
            for x in xs:
                place.copy_(x)
                program()
                got.append([t.clone() for t in program.outputs])
    for mine, theirs in zip(got, wanted * (len(got) // 3), strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            assert error(a.double(), b.double(), floor=1e-6) <= LIMIT[dtype]


@pytest.mark.parametrize(("mixer", "rows", "layers"), [_case(mixer, *size) for mixer in RECURRENT for size in ((1, 1), (2, 1), (1, 2))])
def test_fused_as_for_a_gpu(mixer, rows, layers, monkeypatch):
    """More is fused than on a CPU, with equal results."""
    torch.manual_seed(0)
    lm = LanguageModel(LMConfig(vocab_size=40, dim=32, layers=layers, mixer=mixer)).eval()
    with torch.no_grad():
        _, state = prefill(lm.model, torch.randint(40, (rows, 7)))
        names, leaves = [list(layer) for layer in state.layers], [t.clone() for layer in state.layers for t in layer.values()]

        def step(token, *leaves):
            rest = iter(leaves)
            hidden, new = lm.model(token[:, None], State([{name: next(rest) for name in layer} for layer in names]), return_state=True)
            return [lm.lm_head(hidden)[:, -1], *(t for layer in new.layers for t in layer.values())]

        token = torch.randint(40, (rows,))
        wanted = [t.clone() for t in step(token, *leaves)]
        with monkeypatch.context() as patch:
            patch.setattr(fusion, "on_gpu", lambda t: True)
            module = step_graph.make_step_graph(step, [token, *leaves])
        got = module(token, *leaves)
    for i, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        assert error((mine + 1 if i in module.meta["counters"] else mine).double(), theirs.double()) <= 2e-5


class Own(nn.Module):
    """A user's module: a function of weights and an input."""

    def __init__(self, function, **weights: Tensor):
        super().__init__()
        self.function = function
        for name, weight in weights.items():
            setattr(self, name, nn.Parameter(weight))

    def forward(self, *inputs: Tensor):
        return self.function(self, *inputs)


def _agrees(module, inputs, as_for_a_gpu, monkeypatch):
    """Compare the traced, and on a CPU bound, graph with the module, twice, to detect leftovers of the first run."""
    if as_for_a_gpu:
        monkeypatch.setattr(fusion, "on_gpu", lambda t: True)
    with torch.no_grad():
        traced = step_graph.make_step_graph(module, [x.clone() for x in inputs])
        for _ in range(2):
            for a, b in zip(traced(*(x.clone() for x in inputs)), module(*inputs), strict=True):
                assert a.shape == b.shape and a.dtype == b.dtype
                assert error(a.double(), b.double()) <= 1e-5
        if not as_for_a_gpu:
            for a, b in zip(Program(traced, [x.clone() for x in inputs]).outputs, module(*inputs), strict=True):
                assert a.shape == b.shape and a.dtype == b.dtype
                assert error(a.double(), b.double()) <= 1e-5
    return traced


W = {n: torch.randn(n, 8, generator=torch.Generator().manual_seed(n)) for n in (1, 2, 8)}
WHAT = {
    "one gate for all": (lambda m, x: [F.silu(F.linear(x, m.a)) * F.linear(x, m.b)], {"a": W[1], "b": W[8]}),
    "many gates for one": (lambda m, x: [F.silu(F.linear(x, m.b)) * F.linear(x, m.a)], {"a": W[1], "b": W[8]}),
    "every other number is a bias": (lambda m, x: [F.linear(x, m.a, m.b[:, ::4][0])], {"a": W[2], "b": W[1]}),
    "a vector is a weight": (lambda m, x: [F.linear(x, m.a[0])], {"a": W[1]}),
    "through few to a vector": (lambda m, x: [F.linear(F.linear(x, m.a), m.b[0, :2])], {"a": W[2], "b": W[1]}),
    "narrower steps": (lambda m, x: [F.logsigmoid(F.linear(x.double(), m.a.double()).float()) + m.b[0]], {"a": W[8], "b": W[1]}),
}


@pytest.mark.parametrize("as_for_a_gpu", [False, True])
@pytest.mark.parametrize("what", WHAT)
def test_maps_of_other_shapes(what, as_for_a_gpu, monkeypatch):
    function, weights = WHAT[what]
    _agrees(Own(function, **weights), [torch.randn(1, 1, 8, generator=torch.Generator().manual_seed(0))], as_for_a_gpu, monkeypatch)


PIECES = {
    "the first two": lambda y: (parts := y.split([8, 8, 8], -1), [unit(parts[0]), unit(parts[1]), parts[2]])[-1],
    "the second": lambda y: (parts := y.split([8, 8, 8], -1), [unit(parts[1]), parts[2]])[-1],
    "a row": lambda y: (rows := y.split([1, 1], 0), [unit(rows[0]), rows[1]])[-1],
}


def unit(x: Tensor) -> Tensor:
    return unit_length(x.unflatten(-1, (-1, 4)), eps=1e-6, dtype=x.dtype)


@pytest.mark.parametrize("as_for_a_gpu", [False, True])
@pytest.mark.parametrize("pieces", PIECES)
def test_which_heads_of_a_convolution_are_normed(pieces, as_for_a_gpu, monkeypatch):
    def convolve(m, x, before):
        y, after = convolution_step.step(x, before, m.weight, None, True)
        return [*PIECES[pieces](y), after]

    of = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, tokens, 24, generator=of) for tokens in (1, 3)]
    traced = _agrees(Own(convolve, weight=torch.randn(24, 1, 4, generator=of)), inputs, as_for_a_gpu, monkeypatch)
    (step,) = fusion.calls(traced.graph, convolution_step.step_)
    assert step.kwargs.get("normed", 0) == (16 if as_for_a_gpu and pieces == "the first two" else 0)


@pytest.mark.parametrize("function", [
    lambda m, x: [torch.zeros(1, 1, 8).add_(F.linear(x, m.a))],
    lambda m, x: (y := (h := x * 2)[..., :4], z := F.linear(y, m.a[:, :4]), h.add_(1), [z, F.linear(y, m.a[:, 4:])])[-1],
])  # fmt: skip
def test_what_writes_into_a_tensor_is_no_graph_of_values(function):
    """The zeros would be shared by all steps, and the second map would read the accumulated sum."""
    with pytest.raises(NotImplementedError, match=r"aten.add_.Tensor writes into a tensor"):
        step_graph.make_step_graph(Own(function, a=W[8]), [torch.ones(1, 1, 8)])


def test_pieces_of_a_concatenation_are_what_was_joined():
    """Only a split at the borders of a concatenation disappears."""
    a, b = torch.randn(1, 1, 8), torch.randn(1, 1, 4)

    def counted(sizes, a=a):
        module = step_graph.make_step_graph(lambda x, y: [t * 2 for t in torch.cat([x, y], -1).split(sizes, -1)], [a, b])
        wanted = [t * 2 for t in torch.cat([a, b], -1).split(sizes, -1)]
        assert all(torch.equal(g, w) and g.dtype == w.dtype for g, w in zip(module(a, b), wanted, strict=True))
        return len(fusion.calls(module.graph, torch.ops.aten.cat.default))

    assert counted([8, 4]) == 0 and counted([4, 8]) == 1 and counted([8, 3, 1]) == 1
    assert counted([8, 4], a.bfloat16()) == 1  # it is in float32
