"""Captured decoding steps: the step of a model on static buffers, without Python between its operations.

On a GPU the step is a CUDA graph, sampling included, so that a token is one launch. On a CPU it is a list of calls with
bound arguments. A step is captured once for a model and the shapes of its state, and reused by later generations with equal shapes.
Concurrent generations have a step each, with its own buffers; the graph is traced once for all of them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from linattn.generate import capacity
from linattn.generate.deferral import Deferral
from linattn.generate.program import Program
from linattn.generate.regions import compile_regions
from linattn.generate.sampling import greedy
from linattn.generate.step_graph import make_step_graph
from linattn.ops.gpu import on_gpu
from linattn.state import State
from linattn.state.identity import adapters, sums_of_bits

Choose = Callable[[Tensor], Tensor]  # logits [B, V] -> tokens [B]
FROM = {"cuda": 16, "cpu": 64}  # fewest tokens for which a step is captured
LONG = 256  # fewest tokens for which weights and states move to huge pages on a CPU: 5 ms each of 2 MB in a virtual machine
UNTRACEABLE = (RuntimeError, NotImplementedError, TypeError, ValueError)  # errors of a step that cannot be traced
COMPILES = True  # compiles the small operations between kernels on a GPU
KEPT = 4  # steps kept for one model while their states are small
HELD = 1 << 30  # bytes of small states; of larger ones two steps are kept, and steps with larger caches are dropped after generation
_steps: weakref.WeakKeyDictionary[nn.Module, list[tuple[Hashable, Step]]] = weakref.WeakKeyDictionary()
_making = threading.Lock()  # held while a step is looked up or captured


@dataclass(frozen=True)
class Choice:
    """Sampling of one token. Equal values sample in the same way; ``generator`` None is torch's default generator."""

    choose: Choose = field(compare=False)
    name: Hashable
    generator: torch.Generator | None = None
    stops: tuple[int, ...] = ()


def growth(model: nn.Module, before: State, after: State) -> str | None:
    """Name the state whose shape a step of the backbone ``model`` changed and that cannot be preallocated; None if there is none."""
    for i, (old, new, slots) in enumerate(zip(before.layers, after.layers, capacity.slots_of(model), strict=True)):
        for name, t in new.items():
            if name in slots:
                continue
            if name not in old or old[name].shape != t.shape or old[name].dtype != t.dtype:
                return f"the state of layer {i} grows, its {name!r} is {list(t.shape)} by now"
    return None


def refusal(model: nn.Module) -> str | None:
    """Reason why steps of ``model``, its head included, cannot be captured for any state; None if they can."""
    device = next(model.parameters()).device.type
    if device not in FROM:
        return f"steps are captured on CUDA and CPU devices, and this is {device}"
    if torch.is_autocast_enabled(device):
        return "autocast is on, but a captured step has fixed dtypes"
    for name, module in model.named_modules():
        if hooked(module):
            return f"{name or 'the model'} has hooks or a replaced forward, which a captured step does not call"
    return None


def hooked(module: nn.Module) -> bool:
    """True if ``module`` has forward hooks or a ``forward`` that replaces its class's."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or hasattr(module, "_hf_hook") or "forward" in vars(module)


def step_of(model: nn.Module, head: nn.Module, state: State, tokens: int) -> Step | str:
    """Captured step of the backbone ``model`` with ``head`` for states like ``state``, or the reason why there is none.

    A new step is captured if ``tokens`` more repay its cost, or if another generation uses one for equal states, whose graph it
    shares. For growing states it has cache capacity for all or some of these tokens.
    """
    with _making:
        step = _kept_or_new(model, head, state, tokens)
        if isinstance(step, Step) and tokens >= LONG:
            step.enlarge()
        return step


def _kept_or_new(model: nn.Module, head: nn.Module, state: State, tokens: int) -> Step | str:
    kept, slots = _steps.setdefault(model, []), capacity.slots_of(model)
    used, device = capacity.taken(state, slots), state.position.device.type
    size = 0 if used is None else capacity.slots_for(used, tokens + 1, device)  # including a slot for the last token, which may be read too
    key = (id(head), size, tuple(_kind(t, n in names) for layer, names in zip(state.layers, slots, strict=True) for n, t in layer.items()),
           *fingerprint(model, head))  # fmt: skip
    equal = [step for other, step in kept if other == key]
    if equal and not equal[0].current():  # the others share its graph, so neither are they
        equal, kept[:] = [], [(other, step) for other, step in kept if other != key]
    step = next((step for step in equal if not step.busy), None)
    if step is not None:
        kept.remove((key, step))
        kept.append((key, step))  # the least recently used step is dropped first
        return step
    if not equal and tokens < FROM[device]:
        return f"{tokens} tokens are too few to repay capturing a step: {FROM[device]} are needed"
    try:
        step = Step(model, head, capacity.preallocated(state, slots, size), size=size, like=equal[0] if equal else None)
    except UNTRACEABLE as error:
        return f"it cannot be traced: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    if not size or step.held <= HELD:
        while len(kept) >= (KEPT if step.held + sum(other.held for _, other in kept) <= HELD else 2):
            kept.pop(0)
        kept.append((key, step))
    return step


def _kind(t: Tensor, growing: bool) -> Hashable:
    """Key that is equal for tensors that one step can read."""
    return t.shape[:1] + t.shape[2:] if growing else t.shape, t.dtype, t.device


def fingerprint(*modules: nn.Module) -> tuple[Hashable, ...]:
    """Key of all that a step graph depends on besides shapes."""
    return *_weights(*modules), *_settings(*modules)


def _weights(*modules: nn.Module) -> tuple[Hashable, ...]:
    """Key that changes when a weight is replaced or written to in place."""
    tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
    return tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors)


def _settings(*modules: nn.Module) -> tuple[Hashable, ...]:
    """Key of the settings that a step graph depends on besides weights: PEFT's active adapters and scales, and training mode."""
    return tuple((str(adapters(m)), tuple(part.training for part in m.modules())) for m in modules)


@dataclass(frozen=True)
class Traced:
    """Step graph, the numbers of its inputs that only grow by one, and the weights that its constants were computed from."""

    module: fx.GraphModule
    counters: Sequence[int]
    computed: Sequence[Tensor]


class Step:
    """Decoding step on fixed buffers: reads the tokens in ``tokens``, updates the state, and writes the next tokens over them.

    ``load`` a state and tokens, then ``run`` once per token; where the state grows, only while ``free`` is true. ``state`` is a
    copy of the ``buffers``. A caller holds ``lock`` while other threads may generate.

    ``buffers`` are a state, contiguous in memory, which the step updates in place; ``tokens`` [rows] int64, None: a new tensor. ``size``
    is the cache capacity: slots of each tensor with a slot per token, 0 if there is no such tensor or if the caller counts the slots.
    ``deferral`` defers writes of states; ``state`` is then not up to date. ``like`` is a step of the same model without a deferral, for
    buffers of the same shapes, whose graph is used here too.
    """

    def __init__(
        self, model: nn.Module, head: nn.Module, buffers: State, *, size: int = 0, tokens: Tensor | None = None,
        deferral: Deferral | None = None, like: Step | None = None,
    ) -> None:  # fmt: skip
        with torch.inference_mode(mode=False), torch.no_grad():
            self._slots, self._size, self._used = capacity.slots_of(model), size, 0
            self.buffers = buffers
            self._leaves = [t for layer in self.buffers.layers for t in layer.values()]
            self.tokens = torch.zeros_like(buffers.position) if tokens is None else tokens
            self.ended = torch.zeros_like(self.tokens, dtype=torch.bool)
            inputs = [self.tokens, *self._leaves]
            self._deferral = deferral
            self._traced: Traced = self._trace(model, head, inputs) if like is None else like._traced
            self._module = self._traced.module
            self._counters = [inputs[i] for i in self._traced.counters]
            self._program = None if self.tokens.is_cuda else Program(self._module, inputs, self._counters)
            self._program_moves = [] if self._program is None else self._moves(self._program.outputs[1:])
            copied = [] if self._program is None else self._program.copied
            self._computed = list({id(t): t for t in (*self._traced.computed, *copied)}.values())
            self._sums = sums_of_bits(self._computed)
        self.lock = threading.RLock()
        self.verifications: dict[Hashable, Any] = {}  # of drafts, on these buffers (verify_graph.py)
        self.logits: Tensor | None = None  # [B, V] of the last step
        self._graph: Graph | None = None
        self._choice: Choice | None = None
        self._likeliest: Tensor | None = None  # tokens of the largest logits, if the program computes them
        self._user: Callable[[], Any] = lambda: None

    def _trace(self, model: nn.Module, head: nn.Module, inputs: Sequence[Tensor]) -> Traced:
        defer = {} if self._deferral is None else {"defer": partial(self._deferral.beside, inputs)}
        module = make_step_graph(self._function(model, head), inputs, **defer)
        counters, computed = module.meta["counters"], module.meta["computed"]
        if on_gpu(self.tokens) and COMPILES:  # elsewhere torch's compiler lacks Triton
            module = compile_regions(module)
        return Traced(module, counters, computed)

    def _function(self, model: nn.Module, head: nn.Module) -> Callable[..., list[Tensor]]:
        def step(tokens: Tensor, *leaves: Tensor) -> list[Tensor]:
            hidden, state = model(tokens[:, None], self._state(leaves), return_state=True)
            layers = zip(state.layers, self.buffers.layers, strict=True)
            return [head(hidden)[:, -1], *(layer[name] for layer, names in layers for name in names)]

        return step

    def _state(self, leaves: Sequence[Tensor]) -> State:
        rest = iter(leaves)
        return State([{name: next(rest) for name in layer} for layer in self.buffers.layers])

    def current(self) -> bool:
        """True if the weights that constants were computed from are unchanged; writes through ``data`` are not detected."""
        return self._sums == sums_of_bits(self._computed)

    def enlarge(self) -> None:
        """Move weights and buffers to huge pages on a CPU, for a step that runs often."""
        if self._program is not None:
            self._program.enlarge()

    @property
    def busy(self) -> bool:
        """True while a generation with tokens left decodes by this step."""
        user = self._user()
        return getattr(user, "_step", None) is self and user._left > 0

    @property
    def state(self) -> State:
        return capacity.trimmed(self.buffers, self._slots, self._used)

    @property
    def nbytes(self) -> int:
        """Bytes of ``state``; the buffers may be larger."""
        return capacity.nbytes(self.buffers, self._slots, self._used)

    @property
    def held(self) -> int:
        """Bytes of the buffers."""
        return self.buffers.nbytes

    @property
    def free(self) -> bool:
        """True if the cache capacity allows another token."""
        return not self._size or self._used < self._size

    @property
    def how(self) -> str:
        return "a list of calls" if self._graph is None else "a CUDA graph"

    @torch.inference_mode()
    def load(self, user: Any, state: State, tokens: Tensor, ended: Tensor, choice: Choice) -> None:
        """Start from ``state`` for ``user``; the previous user loses the step. The CUDA graph is kept if ``choice`` is equal."""
        if (last := self._user()) is not None and last is not user and getattr(last, "_step", None) is self:
            last.give_up()
        self._user = weakref.ref(user)
        self.start(choice)
        capacity.fill(self.buffers, state, self._slots)
        self.tokens.copy_(tokens)
        self.ended.copy_(ended)
        self._used = capacity.taken(state, self._slots) or 0

    @torch.inference_mode()
    def start(self, choice: Choice) -> None:
        """Sample by ``choice`` from now on. On a GPU a different choice needs a new CUDA graph, whose capture overwrites the buffers."""
        if choice == self._choice:
            return
        self._choice, self._graph = choice, None
        self._likeliest = self._program.likeliest() if self._program is not None and choice.choose is greedy else None
        capacity.reset_counters(self.buffers)
        if self.tokens.is_cuda:
            self._graph = Graph(self._advance, choice.generator)

    @torch.inference_mode()
    def run(self) -> None:
        if not self.free:
            raise RuntimeError(f"all {self._size} slots of this step are taken: load its state into a step with more")
        self._used += 1
        if self._graph is None:
            self._advance()
        else:
            self._graph.replay()

    def _moves(self, new: Sequence[Tensor]) -> list[tuple[Tensor, Tensor, bool]]:
        """Pairs of an input and the result that replaces it, and whether that result lies in the memory of an input."""
        held = {t.untyped_storage().data_ptr() for t in self._leaves}
        pairs = [(old, t) for old, t in zip(self._leaves, new, strict=True) if t is not old]
        return [(old, t, t.untyped_storage().data_ptr() in held) for old, t in pairs]

    def _advance(self) -> None:
        if self._program is None:
            self.logits, *new = self._module(self.tokens, *self._leaves)
        else:
            self._program()
            self.logits = self._program.outputs[0]
        assert self._choice is not None
        chosen, stops = self._choice.choose(self.logits) if self._likeliest is None else self._likeliest, self._choice.stops
        moves = self._moves(new) if self._program is None else self._program_moves
        if moves:
            torch._foreach_copy_([old for old, *_ in moves], [t.clone() if aliased else t for _, t, aliased in moves])
        if self._counters and self._program is None:
            torch._foreach_add_(self._counters, 1)
        if self._deferral is not None:
            self._deferral.calls.add_(1)
        if not stops:
            self.tokens.copy_(chosen)
            return
        self.tokens.copy_(torch.where(self.ended, self.tokens, chosen))
        for stop in stops:
            self.ended.logical_or_(self.tokens == stop)


class Graph:
    """CUDA graph of ``run``: its work on the buffers as one launch."""

    def __init__(self, run: Callable[[], Any], generator: torch.Generator | None) -> None:
        generators = [torch.cuda.default_generators[torch.cuda.current_device()] if generator is None else generator]
        before = [g.get_state() for g in generators]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # warm-up: compiles kernels, creates handles and workspaces
            run()
            run()
        torch.cuda.current_stream().wait_stream(stream)
        for g, state in zip(generators, before, strict=True):
            g.set_state(state)
        self._graph = torch.cuda.CUDAGraph()
        if generator is not None:
            self._graph.register_generator_state(generator)
        with torch.cuda.graph(self._graph):
            run()

    def replay(self) -> None:
        self._graph.replay()
