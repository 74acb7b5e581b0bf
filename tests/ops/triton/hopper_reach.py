"""A kernel with the :func:`~linattn.ops.triton.hopper.common.reach` of Hopper's scans alone, in a file that no interpreter imports."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper.common import reach


@gluon.jit
def measure(bounds, out, step, count, BACK: gl.constexpr, GROWS: gl.constexpr):
    near, vanishes = reach(bounds, step, count, BACK, 0.5, GROWS, 1 if GROWS else 8)
    gl.store(out, near)
    gl.store(out + 1, vanishes.to(gl.int32))
