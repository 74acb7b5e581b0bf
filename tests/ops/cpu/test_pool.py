"""The thread pool: every index once, from any thread, after a fork, and at the end of a process."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from linattn.ops.cpu.library import LARGE, call

pytestmark = pytest.mark.usefixtures("native")
# At most 32768 numbers, which torch copies on one thread: its own threads do not outlive a fork.


def copied(count, seed=0):
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    y = torch.full_like(x, torch.nan)
    call("convert", x, 0, y, 0, count)
    return torch.equal(x, y)


@pytest.mark.parametrize("number", [1, 2, 3, 8])
def test_every_index_is_done(threads, number):
    threads(number)
    assert all(copied(count) for count in (1, 15, 16, 17, 1000, 20_003, LARGE) for _ in range(20))


@pytest.mark.parametrize("count", [20_001, LARGE])
def test_several_threads_of_the_process_ask_at_a_time(threads, count):
    threads(3)
    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(lambda seed: copied(count, seed), range(100)))


STORM = """
import time, torch
from linattn.ops.cpu import library
torch.set_num_threads(4)
x = torch.arange(16 * 700, dtype=torch.float32)
y = torch.zeros_like(x)
end, wrong = time.monotonic() + 3, 0
while time.monotonic() < end:
    for blocks in (2, 3, 40, 2, 7, 300, 2, 5, 64, 2):
        count = 16 * blocks
        y[:count] = -1
        library.call("convert", x, 0, y, 0, count)
        wrong += not torch.equal(y[:count], x[:count])
print(wrong)
"""


def test_one_short_job_after_the_other(programs):
    """A late thread takes no work of the next, larger job: no hang, and no index is skipped."""
    assert [done.stdout for done in programs.together([("-c", STORM)] * 2, seconds=60)] == ["0\n"] * 2


PROCESS = """
import os, torch
from tests.ops.cpu.test_pool import copied
torch.set_num_threads(3)
assert copied(20_003)
child = os.fork()
if child == 0:
    os._exit(0 if all(copied(20_003) for _ in range(20)) and len(os.listdir("/proc/self/task")) == 3 else 1)
assert copied(20_003) and os.waitpid(child, 0)[1] == 0
runtimes = {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line or "libomp" in line or "libiomp" in line}
print("runtimes of threads:", len(runtimes))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")
def test_a_process_forks_and_ends_while_its_threads_wait(programs):
    done = programs.python("-c", PROCESS)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "runtimes of threads: 1\n"  # only torch's


FEW = """
import os, torch
from linattn.ops import linears
torch.set_num_threads(3)
x, few, many = torch.randn(1, 128), torch.randn(128, 128), torch.randn(1024, 128)
before = len(os.listdir("/proc/self/task"))
steps = [("log_sigmoid", None), ("div", 16.0), ("exp", None), ("tanh", None)]  # for which torch has its threads come
for matrix in (few, many):
    linears.linears(x, [matrix], [None], finish=[steps])
    print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")
def test_few_products_are_left_to_one_thread(programs):
    done = programs.python("-c", FEW)
    assert done.stdout.split() == ["0", "2"], done.stderr[-2000:]


LONG = """
import os, torch
from linattn.ops.cpu.library import LARGE, call, reason
torch.set_num_threads(3)

def copied(x, y):
    y.numpy()[:] = 0
    call("convert", x, 0, y, 0, len(x))
    return bool((x.numpy() == y.numpy()).all())

def threads():
    return len(os.listdir("/proc/self/task"))

def fork():
    child = os.fork()
    if child == 0:
        os._exit(0 if copied(x, y) and threads() == 3 else 1)
    assert os.waitpid(child, 0)[1] == 0

x = torch.ones(LARGE)
y = x + x
assert reason() is None
fork()
before = threads()
assert copied(x, y) and threads() == before, (before, threads())
assert copied(x[:1000], y[:1000]) and threads() == before + 2, (before, threads())
assert bool((torch.full((LARGE,), 1e-40) * 2 > 0).all())
fork()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")
def test_long_jobs_are_those_of_torch_s_threads(programs):
    """Torch's threads spin after its operations, so others would share their cores. A forked child has none of them."""
    done = programs.python("-c", LONG)
    assert done.returncode == 0, done.stderr[-2000:]


def test_subnormal_numbers_count_again_afterwards():
    tiny = torch.tensor([1e-40])
    assert copied(100) and (tiny + tiny).item() > 0


def test_threads_that_have_nothing_to_do_sleep(threads):
    """Spinning threads would take cores from a busy process, so that every call waits for the scheduler."""
    threads(4)
    assert copied(20_003)
    before = time.process_time()
    for _ in range(10):
        time.sleep(0.02)
        assert copied(2_003)
    assert time.process_time() - before < 0.1
