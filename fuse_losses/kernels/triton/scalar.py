"""The scalar language of `losses.scalar` on float32 tiles. Accurate without libdevice, which the interpreter lacks.

The compiler merges no product with a sum in these kernels (it would on one side and not on the other, and equal sides
would differ): where that is wanted, it says `fma`.
"""

import triton
import triton.language as tl


# functions of their own, not aliases: the interpreter replaces those of `tl`
@triton.jit
def exp(x):
    return tl.exp(x)


@triton.jit
def log(x):
    return tl.log(x)


@triton.jit
def abs(x):
    return tl.abs(x)


@triton.jit
def where(condition, x, y):
    return tl.where(condition, x, y)


@triton.jit
def expm1(x):
    # Taylor where exp(x) - 1 cancels; the first term left out is 0.5^9 / 9!, relative 1e-8
    tail = tl.fma(tl.fma(tl.fma(x, 1 / 40320, 1 / 5040), x, 1 / 720), x, 1 / 120)
    near = tl.fma(tl.fma(tl.fma(tl.fma(tail, x, 1 / 24), x, 1 / 6), x, 1 / 2), x * x, x)
    return tl.where(tl.abs(x) < 0.5, near, tl.exp(x) - 1.0)


@triton.jit
def log1p(x):
    # 2 atanh(s) with |s| <= 1/3 where log(1 + x) cancels; the first term left out is s^16 / 17, relative 1e-9. Below
    # -0.5 the sum 1 + x is exact.
    s = x / (2.0 + x)
    t = s * s
    tail = tl.fma(tl.fma(tl.fma(t, 1 / 15, 1 / 13), t, 1 / 11), t, 1 / 9)
    tail = tl.fma(tl.fma(tl.fma(tail, t, 1 / 7), t, 1 / 5), t, 1 / 3)
    near = 2.0 * tl.fma(s * t, tail, s)
    return tl.where(tl.abs(x) <= 0.5, near, tl.log(1.0 + x))
