"""Every mixer on a GPU: agreement with the CPU in every layout, and no synchronisation."""

import pytest
import torch

from linattn.mixers import available, create, create_bidirectional, info

pytestmark = pytest.mark.gpu

KNOWN = list(map(info, available()))
RESUMABLE = [i.name for i in KNOWN if i.resumable]
OTHERS = [i.name for i in KNOWN if not i.resumable or i.bidirectional]


def run(mixer, x, mask, cu):
    """Outputs, states and gradients of: a prefill, a step after it, padding after it, packed sequences."""
    y, state = mixer(x, return_state=True)
    step, _ = mixer(x[:, :1], state, return_state=True)
    padded, after = mixer(x, state, mask=mask, return_state=True)
    packed, last = mixer(x.reshape(1, -1, x.shape[2]), cu_seqlens=cu, return_state=True)
    again = mixer(x.reshape(1, -1, x.shape[2]), last, cu_seqlens=cu)
    loss = sum((t * torch.linspace(-1, 1, t.numel(), device=t.device).view_as(t)).sum() for t in (y, step, padded, packed, again))
    gradients = torch.autograd.grad(loss, [x, *mixer.parameters()])
    return [y, step, padded, packed, again, *state.values(), *after.values(), *last.values(), *gradients]


def arguments(device):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 70, 64, generator=generator)
    mask, cu = torch.rand(2, 70, generator=generator) > 0.3, torch.tensor([0, 3, 3, 90, 140])
    return x.to(device).requires_grad_(), mask.to(device), cu.to(device)


@pytest.mark.parametrize("name", RESUMABLE)
def test_numbers_of_the_cpu(name):
    mixer = create(name, dim=64).double()
    x, mask, cu = arguments("cpu")
    wanted = run(mixer, x.detach().double().requires_grad_(), mask, cu)
    x, mask, cu = arguments("cuda")
    for ours, theirs in zip(run(mixer.cuda(), x.detach().double().requires_grad_(), mask, cu), wanted, strict=True):
        if ours.ndim > 1 and ours.shape[1] > theirs.shape[1]:  # padding after the longest packed sequence, which only a CPU omits
            ours = ours[:, : theirs.shape[1]]
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", RESUMABLE)
def test_no_waiting(name):
    mixer, inputs = create(name, dim=64).cuda(), arguments("cuda")
    run(mixer, *inputs)  # libraries are loaded on first use
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(mixer, *inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", RESUMABLE)
def test_low_precision_is_finite_and_steady(name):
    x, mask, cu = arguments("cuda")
    mixer = create(name, dim=64).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        runs = [run(mixer, x, mask, cu) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        assert first.isfinite().all()
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    low = mixer.bfloat16()
    assert low(x.bfloat16()).isfinite().all()


@pytest.mark.parametrize("name", OTHERS)
def test_numbers_of_the_cpu_in_one_pass(name):
    """Of bidirectional, cross, grid, resampling and token-wise mixers."""
    known = info(name)
    mixer = (create_bidirectional if known.bidirectional else create)(name, dim=64).double()
    x, runs = arguments("cpu")[0].detach().double(), []
    for device in ("cpu", "cuda"):
        here = x.to(device).requires_grad_()
        y = mixer.to(device)(*mixer.arguments(here))
        y = y[0] if isinstance(y, tuple) else y
        weights = torch.linspace(-1, 1, y.numel(), device=device, dtype=y.dtype).view_as(y)
        runs.append([y, *torch.autograd.grad((y * weights).sum(), [here, *mixer.parameters()], materialize_grads=True)])
    rounded = any(isinstance(m, torch.nn.Hardswish) for m in mixer.modules())  # CUDA's has its 1/6 in float32
    limit = 1e-6 if rounded else 1e-9
    for ours, theirs in zip(runs[1], runs[0], strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=limit, atol=limit)
