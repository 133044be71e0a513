"""Squash functions for Triton. To add one, write its pair and one line of `SQUASHES`.

A pair is `f(u, inner, outer) -> z` and `dz/du` written in terms of `z`, both on float32 tiles.
"""

import triton
import triton.language as tl


@triton.jit
def _identity(u, inner, outer):
    return u * (inner * outer)


@triton.jit
def _identity_slope(z, inner, outer):
    return inner * outer


@triton.jit
def _tanh(u, inner, outer):
    # Cephes tanhf: a polynomial near 0, where 1 - 2 / (exp(2x) + 1) would cancel
    x = u * inner
    s = x * x
    small = (((-5.70498872745e-3 * s + 2.06390887954e-2) * s - 5.37397155531e-2) * s + 1.33314422036e-1) * s
    small = (small - 3.33332819422e-1) * s * x + x
    large = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    return outer * tl.where(tl.abs(x) < 0.625, small, large)


@triton.jit
def _tanh_slope(z, inner, outer):
    return inner * (outer - z * (z / outer))  # inner * outer * (1 - tanh^2), tanh = z / outer


SQUASHES = {"identity": (_identity, _identity_slope), "tanh": (_tanh, _tanh_slope)}
