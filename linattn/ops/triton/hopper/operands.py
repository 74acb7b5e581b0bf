"""Operands of the products of the erase rule's gradients, in registers or rounded in shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def pick(chosen, layout: gl.constexpr):
    """A 0/1 matrix as a left operand, in registers: see prepare_channel.left."""
    x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [gl.where(chosen, 1.0, 0.0).to(gl.bfloat16)], gl.bfloat16, False, 2)
    return gl.convert_layout(x, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


@gluon.jit
def hold(tile, x):
    tile.store(x.to(gl.bfloat16))


@gluon.jit
def scaled(tile, x, weight):
    """``x`` weighted, rounded and left in shared memory for products; as it is there."""
    y = (x.to(gl.float32) * weight).to(gl.bfloat16)
    tile.store(y)
    return y


@gluon.jit
def held(tile, layout: gl.constexpr):
    return tile.load(layout).to(gl.float32)


@gluon.jit
def again(x):
    """2^x, which no compiler keeps in registers from when it was last wanted."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, False, 1)


@gluon.jit
def pinned(x):
    """``x``, computed before what follows: a product that goes on with accumulators overwrites what ``x`` is formed of.

    LLVM may put the arithmetic off until after the product has begun, with negated copies of the accumulators at hand, and ptxas 13.4
    (triton 3.9) makes those copies the accumulators themselves; it then also has all products of the kernel wait for each other.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], gl.float32, False, 1)
