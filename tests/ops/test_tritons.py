"""Optimizations that are off under a triton without some feature, and their text in ``explain``; no GPU needed."""

import sys
from types import SimpleNamespace

import pytest
import torch

import linattn
from tests.ops.cases import make

pytest.importorskip("triton")
from linattn.ops import checks, gpu
from linattn.ops.inputs import Given
from linattn.ops.triton import hopper, launch, linear_attention, probe, record
from linattn.ops.triton.hopper import choice

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


class OnGpu(torch.Tensor):
    """Tensor that reports a GPU as device."""

    device = GPU  # type: ignore[assignment]


class Compiled:
    """Like ``CompiledKernel``: ``run`` returns ``_run``."""

    function, packed_metadata = 7, (4, 1, 0)

    def __init__(self):
        self._run = self.launched = lambda *arguments: None

    @property
    def run(self):
        return self._run


class Kernel:
    """A kernel whose launch passes ``told(*arguments)`` to ``CompiledKernel.run``."""

    params = (None,) * 4  # two tensors, a number, a constant

    def __init__(self, told):
        self.told, self.compiled = told, Compiled()

    def __getitem__(self, grid):
        def launched(*arguments, BLOCK, **options):
            self.compiled.run(*self.told(*grid, 0, 7, (4, 1, 0), None, None, None, *arguments, BLOCK))
            return self.compiled

        return launched


@pytest.fixture(autouse=True)
def untried(monkeypatch):
    """Clear cached answers before and after a test."""
    monkeypatch.setattr(launch, "_replay_refusals", {})
    monkeypatch.setattr(hopper, "_gluon_refusals", {})


@pytest.mark.parametrize("refusal", [launch.replay_refusal, hopper.gluon_refusal])
def test_a_failure_is_a_reason_and_is_not_tried_again(refusal, monkeypatch):
    """There is no GPU to launch on."""
    reason = refusal(CPU)
    assert reason is not None and "under triton" in reason
    monkeypatch.setattr(probe, "refusal", None)
    assert refusal(CPU) == reason


@pytest.mark.parametrize("refusal", [launch.replay_refusal, hopper.gluon_refusal])
def test_nothing_is_tried_while_a_graph_is_captured(refusal, monkeypatch):
    for module in (launch, hopper):
        monkeypatch.setattr(module, "capturing", lambda: True)
    assert "captured" in refusal(CPU)
    for module in (launch, hopper):
        monkeypatch.setattr(module, "capturing", lambda: False)
    assert "captured" not in refusal(CPU)


def test_names_that_gluon_lacks_are_listed(monkeypatch):
    from linattn.ops.triton.hopper import names

    monkeypatch.setattr(names, "missing", [])
    assert names.first(SimpleNamespace(old=1, new=2), "new", "old") == 2
    assert names.first(SimpleNamespace(old=1), "new", "old") == 1 and not names.missing
    assert names.first(None, "async_load", "async_copy") is None
    assert "has no async_load or async_copy" in hopper.gluon_refusal(CPU)


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (lambda *given: given, None),
        (lambda x, *given: (*given, x), "passes other arguments"),  # the grid comes last
        (lambda *given: (*given[:9], given[10], given[9], *given[11:]), "passes other arguments"),  # another order
        (lambda *given: (*given, 0), "passes other arguments"),  # one more
        (lambda *given: given[:9], "passes other arguments"),  # all in one argument
    ],
    ids=["ours", "grid", "order", "longer", "shorter"],
)
def test_what_triton_passes_is_looked_at_before_it_is_trusted(told, reason, monkeypatch):
    monkeypatch.setattr(record, "current_stream", lambda: 0)
    kernel, tensors = Kernel(told), (torch.zeros(2), torch.ones(2))
    recorder = launch.Recorder(tensors[0], ())
    recorder.launch(kernel, (1, 1, 1), tensors, (5,), BLOCK=2)
    found = probe.unlike_ours(recorder)
    assert found is None if reason is None else reason in found
    assert kernel.compiled.run is kernel.compiled.launched  # as it was


def test_pauses_stand_between_the_launches_of_a_replay(monkeypatch):
    monkeypatch.setattr(record, "current_stream", lambda: 0)
    done: list[str] = []
    pauses = (lambda: done.append("pause"), lambda: done.append("second pause"))
    recorder = launch.Recorder(torch.zeros(2), (x := torch.zeros(2),), pauses)
    for name in ("first", "second", "third"):
        kernel = Kernel(lambda *given: given)
        kernel.compiled._run = lambda *_, name=name: done.append(name)
        recorder.launch(kernel, (1, 1, 1), (x, x), (5,), BLOCK=2)
        if name != "third":
            recorder.pause()
    wanted = ["first", "pause", "second", "second pause", "third"]
    assert done == wanted
    done.clear()
    record.Program(recorder, ())(x, [x.data_ptr()], pauses)
    assert done == wanted


def test_a_launch_that_goes_another_way_is_not_replayed(monkeypatch):
    monkeypatch.setattr(record, "current_stream", lambda: 0)
    kernel = Kernel(lambda *given: given)
    recorder = launch.Recorder(torch.zeros(2), ())
    recorder.launches = [(kernel, SimpleNamespace(run=None), (1, 1, 1), (torch.zeros(2), torch.ones(2)), (5,))]
    assert "does not launch by CompiledKernel.run" in probe.unlike_ours(recorder)


@pytest.mark.parametrize(
    ("kind", "size", "gluon", "said"),
    [
        ("erase", 64, "no Gluon", "hopper kernels: off, because no Gluon"),
        ("erase", 48, None, "hopper kernels: off, because they take K of 64 or 128"),
        ("erase", 64, None, None),
        ("plain", 64, None, None),
    ],
)
def test_explain_says_what_is_off(kind, size, gluon, said, monkeypatch, capsys):
    call = make(kind, "BTHK", T=64, K=size, V=64).to(torch.bfloat16)
    inputs, _ = checks.call(Given(**call.arguments()))
    for name in ("q", "k", "v"):
        object.__setattr__(inputs, name, getattr(inputs, name).as_subclass(OnGpu))
    door = sys.modules[linattn.linear_attention.__module__]
    monkeypatch.setattr(door, "refusal", lambda name, *_: None if name == "triton" else "it was not asked for")
    monkeypatch.setattr(checks, "call", lambda _: (inputs, None))
    monkeypatch.setattr(gpu, "capability", lambda device: (9, 0))
    monkeypatch.setattr(launch, "on_device", lambda device: record.nullcontext())
    monkeypatch.setattr(launch, "replay_refusal", lambda device: "a reason")
    monkeypatch.setattr(hopper, "gluon_refusal", lambda device: gluon)
    lines = linattn.explain(**call.arguments()).splitlines()
    assert "replayed launches: off, because a reason" in lines
    found = [line for line in lines if line.startswith("hopper")]
    assert not found if said is None else len(found) == 1 and found[0].startswith(said)
    monkeypatch.setattr(launch, "replay_refusal", lambda device: None)
    assert "replayed" not in linattn.explain(**call.arguments())
    capsys.readouterr()


@pytest.mark.parametrize(
    ("kind", "rank", "size", "heads", "said"),
    [
        ("beta", "BTH", 128, 64, "its 64 programs would leave 68 of 132 multiprocessors idle"),
        ("beta", "none", 128, 140, "its 140 programs would leave 124 of 132 multiprocessors idle"),
        ("plain", "H", 128, 64, "its 64 programs would leave 68 of 132 multiprocessors idle"),
        ("beta", "H", 128, 128, "the gradient of a constant decay, a sum over tokens with cancellation, would be inaccurate"),
        ("beta", "BTH", 128, 128, None),
        ("beta", "BTH", 64, 64, None),  # no such kernel exists
        ("beta", "BTHK", 128, 64, None),
        ("plain", "none", 128, 64, None),
        ("plain", "BTHK", 128, 64, "its 64 programs would leave 68 of 132 multiprocessors idle"),
        ("plain", "BTHK", 128, 128, None),
        ("bonus", "BTHK", 128, 64, None),
    ],
)
def test_explain_says_why_the_backward_pass_is_several_kernels(kind, rank, size, heads, said, monkeypatch):
    call = make(kind, rank, B=1, T=64, H=heads, K=size, V=size).to(torch.bfloat16, torch.bfloat16)
    monkeypatch.setattr(choice, "multiprocessors", lambda device: 132)
    assert off_backwards(call) == ([] if said is None else [f"one kernel for the backward pass: off, because {said}"])


def test_explain_says_that_one_kernel_takes_decays_per_channel_in_bfloat16_only(monkeypatch):
    call = make("plain", "BTHK", B=1, T=64, H=128, K=128, V=128).to(torch.bfloat16)
    monkeypatch.setattr(choice, "multiprocessors", lambda device: 132)
    (line,) = off_backwards(call)
    assert line == "one kernel for the backward pass: off, because decays per channel do not suit it: they take bfloat16 only"


@pytest.mark.parametrize(
    ("kind", "rank", "tokens", "lengths", "off"),
    [
        ("beta", "BTH", 128, None, False),
        ("beta", "none", 128, None, False),
        ("beta", "BTH", 100, None, True),
        ("beta", "BTH", None, (64, 64), True),
        ("plain", "BTH", 100, None, False),  # prepares nothing
        ("plain", "BTHK", 100, None, False),
    ],
)
def test_explain_says_why_chunks_are_prepared_twice(kind, rank, tokens, lengths, off, monkeypatch):
    shape = dict(lengths=lengths) if lengths else dict(B=1, T=tokens)
    monkeypatch.setattr(choice, "multiprocessors", lambda device: 1)
    lines = off_backwards(make(kind, rank, H=1, K=128, V=128, **shape).to(torch.bfloat16, torch.bfloat16 if rank == "BTHK" else None))
    wanted = "chunks prepared once for both passes: off, because not every chunk has 64 tokens"
    assert len(lines) == off and all(line.startswith(wanted) for line in lines)


def off_backwards(call):
    leaves = {name: t.requires_grad_() for name, t in call.tensors.items()}
    inputs, _ = checks.call(Given(**call.with_(**leaves).arguments()))
    return linear_attention.off_backwards(inputs)


def test_off_asks_no_device_that_is_no_gpu(monkeypatch):
    monkeypatch.setattr(launch, "replay_refusal", None)
    assert launch.off(CPU) == []
    inputs, _ = checks.call(Given(**make("plain", "BTH", T=20).arguments()))
    assert linear_attention.off(inputs, "auto") == []
