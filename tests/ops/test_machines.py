"""On machines whose GPU the kernels do not support, every operation falls back to torch, and explain gives the reason."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from linattn.ops import gpu
from linattn.ops.gpu import Card
from tests.ops.machines import calls, explained, machine, properties

ROOT = Path(__file__).parents[2]
T4, H100, AMPERE = properties(7, 5, "Tesla T4", 64 << 10), properties(9, 0, "H100", 227 << 10, 132), properties(8, 6)
MACHINES = {  # devices reported by torch, the device, and expected words of the reason
    "an old GPU": (dict(cards=[T4]), "cuda:0", ("compute capability 8.0", "Tesla T4", "7.5")),
    "ROCm": (dict(cards=[properties(9, 4, "MI300X")], hip="6.4"), "cuda:0", ("AMD", "ROCm")),
    "ROCm on gfx90a, which says (9, 0)": (dict(cards=[properties(9, 0, "MI250")], hip="6.4"), "cuda:0", ("AMD", "ROCm")),
    "XPU": (dict(cards=[]), "xpu:0", ("Intel", "XPU")),
    "Triton without a GPU": (dict(cards=[]), "cuda:0", ("finds no NVIDIA GPU",)),
    "the older of two GPUs": (dict(cards=[H100, T4]), "cuda:1", ("cuda:1", "7.5")),
    "CUDA without Triton": (dict(cards=[AMPERE]), "cuda:0", ("the package triton is not installed",)),
}
OPERATIONS = list(calls())


def enter(monkeypatch, name):
    seen, device, said = MACHINES[name]
    if name == "CUDA without Triton":
        monkeypatch.setitem(sys.modules, "triton", None)
    return machine(monkeypatch, *seen["cards"], hip=seen.get("hip"), device=device), said


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", MACHINES)
def test_operations_fall_back(name, operation, monkeypatch):
    there, _ = enter(monkeypatch, name)
    with there:
        result = calls()[operation]()
    first = result[0] if isinstance(result, (tuple, list)) else result
    assert first.isfinite().all()


@pytest.mark.parametrize("name", MACHINES)
def test_explain_says_why(name, monkeypatch):
    there, said = enter(monkeypatch, name)
    with there:
        texts = explained()
    for operation, text in texts.items():
        (line,) = (x for x in text.splitlines() if x.strip().startswith("triton:"))
        assert line.strip().startswith("triton: no, ") and all(word in line for word in said), (operation, line)
        assert any(x.strip().startswith("torch: runs") for x in text.splitlines())


def test_kernels_asked_for_by_name_raise_the_reason(monkeypatch):
    there, _ = enter(monkeypatch, "ROCm")
    with there, pytest.raises(ValueError, match="cannot run this call: it needs an NVIDIA GPU, and this is an AMD GPU"):
        import linattn

        x = torch.ones(1, 4, 8)
        linattn.diagonal_scan(-x, x, backend="triton")


def test_each_of_two_gpus_is_asked_about(monkeypatch):
    with machine(monkeypatch, H100, AMPERE):
        big, small = (gpu.card(torch.device("cuda", i)) for i in range(2))
        assert big == Card((9, 0), 227 << 10, 132) and small == Card((8, 6), 99 << 10, 40)
        assert gpu.card(torch.device("cuda")) == big and (big.generation, small.generation) == (90, 86)
        assert gpu.refusal(torch.device("cuda", 1)) is None and gpu.capability(torch.device("cuda", 1)) == (8, 6)
    with machine(monkeypatch, T4, AMPERE):
        assert gpu.refusal(torch.device("cuda", 0)) and not gpu.refusal(torch.device("cuda", 1))


def test_what_is_no_nvidia_gpu_has_no_capability(monkeypatch):
    """So that gfx90a, with capability (9, 0), is not taken for a Hopper."""
    from linattn.ops.triton import hopper

    with machine(monkeypatch, properties(9, 0, "MI250"), hip="6.4"):
        assert gpu.capability(torch.device("cuda", 0)) == (0, 0) and not hopper._hopper(torch.device("cuda", 0))
    with machine(monkeypatch, H100):
        assert gpu.capability(torch.device("cuda", 0)) == (9, 0)


def test_a_triton_that_does_not_load_is_none(monkeypatch, tmp_path):
    (tmp_path / "triton.py").write_text("raise ImportError('libtriton.so: undefined symbol')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    with machine(monkeypatch, H100):
        assert gpu.refusal(torch.device("cuda", 0)) == "the package triton cannot be imported: libtriton.so: undefined symbol"


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import linattn
from pytest import MonkeyPatch
from tests.ops.machines import calls, explained, machine, properties
with machine(MonkeyPatch(), properties(9, 0)):
    for name, call in calls().items():
        call()
    explained()
assert not [name for name in sys.modules if name.startswith("linattn.ops.triton.")]
"""


def test_nothing_of_triton_is_imported_where_it_is_not_installed():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
