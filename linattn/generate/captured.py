"""The decoding step of a model, captured: on buffers that stay where they are, with everything that Python does between them left out.

On a GPU the step is a CUDA graph, sampling included, so that a token is one launch. On a CPU it is a list of calls with their
arguments bound. Either is made once for a model and the shapes of its state, and serves every later generation of that kind.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from linattn.generate import room
from linattn.generate.flat import trace
from linattn.generate.joins import on_gpu
from linattn.generate.program import Program
from linattn.generate.regions import compile_regions
from linattn.state import State
from linattn.state.identity import adapters, sums_of_bits

Choose = Callable[[Tensor], Tensor]  # logits [B, V] -> tokens [B]
FROM = {"cuda": 16, "cpu": 64}  # tokens that are worth tracing a step for
COMPILES = True  # whether what is left between kernels on a GPU is compiled
KEPT = 4  # steps of one model, where their states are small
HELD = 1 << 30  # bytes of small states; else two steps are kept, and one whose cache alone has more ends with its generation
_steps: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Step]] = weakref.WeakKeyDictionary()
_making = threading.Lock()  # held by the thread that looks for a step or makes one


@dataclass(frozen=True)
class Choice:
    """How a token is chosen. What is equal chooses equally; ``generator`` None: torch's own."""

    choose: Choose = field(compare=False)
    name: Hashable
    generator: torch.Generator | None = None
    stops: tuple[int, ...] = ()


def growth(model: nn.Module, before: State, after: State) -> str | None:
    """Which state a step of ``model``, a backbone, has changed the shape of and can be given no room, in words; None: none."""
    for i, (old, new, slots) in enumerate(zip(before.layers, after.layers, room.slots_of(model), strict=True)):
        for name, t in new.items():
            if name in slots:
                continue
            if name not in old or old[name].shape != t.shape or old[name].dtype != t.dtype:
                return f"the state of layer {i} grows, its {name!r} is {list(t.shape)} by now"
    return None


def refusal(model: nn.Module) -> str | None:
    """Why steps of ``model``, its head among it, cannot be captured, whatever its state is; None: they can."""
    device = next(model.parameters()).device.type
    if device not in FROM:
        return f"steps are captured on CUDA and on a CPU, and this is {device}"
    if torch.is_autocast_enabled(device):
        return "autocast is on, and a captured step keeps the dtypes that it was made with"
    for name, module in model.named_modules():
        if hooked(module):
            return f"somebody has hooked into {name or 'the model'}, and a captured step calls no hooks"
    return None


def hooked(module: nn.Module) -> bool:
    """Whether somebody looks at calls of ``module``, or has put a forward of his own in the place of its class's."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or hasattr(module, "_hf_hook") or "forward" in vars(module)


def step_of(model: nn.Module, head: nn.Module, state: State, tokens: int) -> Step | str:
    """The captured step of ``model``, a backbone with this ``head``, for states like ``state``; or why there is none.

    A new one is made if ``tokens`` more make it worth it. Where states grow it has room for as many, or for some of them.
    """
    with _making:
        return _kept_or_new(model, head, state, tokens)


def _kept_or_new(model: nn.Module, head: nn.Module, state: State, tokens: int) -> Step | str:
    kept, slots = _steps.setdefault(model, {}), room.slots_of(model)
    used, device = room.taken(state, slots), state.position.device.type
    size = 0 if used is None else room.capacity(used, tokens + 1, device)  # the state after the last of them may be wanted too
    key = (id(head), size, tuple(_kind(t, n in names) for layer, names in zip(state.layers, slots, strict=True) for n, t in layer.items()),
           *_weights(model, head), *_settings(model, head))  # fmt: skip
    step = kept.pop(key, None)
    if step is not None and step.current():
        kept[key] = step  # the last one used is the last to go
        return step
    if tokens < FROM[device]:
        return f"for {tokens} tokens it is not worth it: it is from {FROM[device]} on"
    try:
        step = Step(model, head, state, size)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        return f"it cannot be traced: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    if not size or step.held <= HELD:
        while len(kept) >= (KEPT if step.held + sum(other.held for other in kept.values()) <= HELD else 2):
            kept.pop(next(iter(kept)))
        kept[key] = step
    return step


def _kind(t: Tensor, roomy: bool) -> Hashable:
    """Equal for states that one step serves."""
    return t.shape[:1] + t.shape[2:] if roomy else t.shape, t.dtype, t.device


def _weights(*modules: nn.Module) -> tuple[Hashable, ...]:
    """What changes when weights do, in place or not."""
    tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
    return tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors)


def _settings(*modules: nn.Module) -> tuple[Hashable, ...]:
    """What a trace follows beside weights: which of PEFT's adapters work and how strongly, and what only acts in training."""
    return tuple((str(adapters(m)), tuple(part.training for part in m.modules())) for m in modules)


class Step:
    """Reads the tokens in its buffer into the state in its buffers, and puts those that come next in the place of the first.

    ``load`` a state and tokens, then ``run`` as often as wanted, but where the state grows no more often than ``free`` says; ``state``
    is a copy of what the buffers hold. Who does so while other threads generate holds ``lock``.

    ``size`` is for how many slots there is room in what has one for every token.
    """

    def __init__(self, model: nn.Module, head: nn.Module, state: State, size: int) -> None:
        with torch.inference_mode(mode=False), torch.no_grad():
            self._slots, self._size, self._used = room.slots_of(model), size, 0
            self._wide = room.widened(state, self._slots, size)
            self._leaves = [t for layer in self._wide.layers for t in layer.values()]
            self.tokens = torch.zeros(state.rows, dtype=torch.int64, device=state.position.device)
            self.ended = torch.zeros_like(self.tokens, dtype=torch.bool)
            inputs = [self.tokens, *self._leaves]
            self._module = trace(self._function(model, head), inputs)
            self._counters = [inputs[i] for i in self._module.meta["counters"]]
            computed = self._module.meta["computed"]
            if on_gpu(self.tokens) and COMPILES:  # else torch's compiler has no Triton to write in
                self._module = compile_regions(self._module)
            self._program = None if self.tokens.is_cuda else Program(self._module, inputs)
            copied = [] if self._program is None else self._program.copied
            self._computed = list({id(t): t for t in (*computed, *copied)}.values())
            self._sums = sums_of_bits(self._computed)
        self.lock = threading.RLock()
        self._graph: Graph | None = None
        self._choice: Choice | None = None
        self._user: Callable[[], Any] = lambda: None

    def _function(self, model: nn.Module, head: nn.Module) -> Callable[..., list[Tensor]]:
        def step(tokens: Tensor, *leaves: Tensor) -> list[Tensor]:
            hidden, state = model(tokens[:, None], self._state(leaves), return_state=True)
            layers = zip(state.layers, self._wide.layers, strict=True)
            return [head(hidden)[:, -1], *(layer[name] for layer, names in layers for name in names)]

        return step

    def _state(self, leaves: Sequence[Tensor]) -> State:
        rest = iter(leaves)
        return State([{name: next(rest) for name in layer} for layer in self._wide.layers])

    def current(self) -> bool:
        """Whether what has been computed from weights is what they hold now: no version counts what is written to their ``data``."""
        return self._sums == sums_of_bits(self._computed)

    @property
    def state(self) -> State:
        return room.narrowed(self._wide, self._slots, self._used)

    @property
    def nbytes(self) -> int:
        """Bytes of ``state``; the buffers may have more."""
        return room.nbytes(self._wide, self._slots, self._used)

    @property
    def held(self) -> int:
        """Bytes of the buffers."""
        return self._wide.nbytes

    @property
    def free(self) -> bool:
        """Whether there is room for another token."""
        return not self._size or self._used < self._size

    @property
    def how(self) -> str:
        return "a list of calls" if self._graph is None else "a CUDA graph"

    @torch.inference_mode()
    def load(self, user: Any, state: State, tokens: Tensor, ended: Tensor, choice: Choice) -> None:
        """Go on from here, for ``user``: whoever did so before gives it up. A CUDA graph is kept for an equal ``choice``."""
        if (last := self._user()) is not None and last is not user and getattr(last, "_step", None) is self:
            last.give_up()
        self._user = weakref.ref(user)
        if choice != self._choice:
            self._choice, self._graph = choice, None
            room.clear(self._wide)
            if self.tokens.is_cuda:
                self._graph = Graph(self._advance, choice.generator)
        room.fill(self._wide, state, self._slots)
        self.tokens.copy_(tokens)
        self.ended.copy_(ended)
        self._used = room.taken(state, self._slots) or 0

    @torch.inference_mode()
    def run(self) -> None:
        if not self.free:
            raise RuntimeError(f"all {self._size} slots of this step are taken: load its state into one with more")
        self._used += 1
        if self._graph is None:
            self._advance()
        else:
            self._graph.replay()

    def _advance(self) -> None:
        if self._program is None:
            logits, *new = self._module(self.tokens, *self._leaves)
        else:
            self._program()
            logits, *new = self._program.outputs
        assert self._choice is not None
        chosen, stops = self._choice.choose(logits), self._choice.stops
        held = {t.untyped_storage().data_ptr() for t in self._leaves}
        new = [t if t is old or t.untyped_storage().data_ptr() not in held else t.clone() for old, t in zip(self._leaves, new, strict=True)]
        moved = [(old, t) for old, t in zip(self._leaves, new, strict=True) if t is not old]
        if moved:
            torch._foreach_copy_([old for old, _ in moved], [t for _, t in moved])
        if self._counters:
            torch._foreach_add_(self._counters, 1)
        if not stops:
            self.tokens.copy_(chosen)
            return
        self.tokens.copy_(torch.where(self.ended, self.tokens, chosen))
        for stop in stops:
            self.ended.logical_or_(self.tokens == stop)


class Graph:
    """What ``run`` does to buffers on a GPU, as one launch."""

    def __init__(self, run: Callable[[], Any], generator: torch.Generator | None) -> None:
        generators = [torch.cuda.default_generators[torch.cuda.current_device()] if generator is None else generator]
        before = [g.get_state() for g in generators]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles, makes handles and work space
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
