"""RMSNorm of the residual stream, forward and backward, timed beside XLA's and checked against it.

M rows, D columns.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.kernels import rms_norm as kernel
from jaxscale.perf.bandwidth import Rival, lines_of
from jaxscale.perf.turns import error

# Tokens and model dimension: four rows of 8,192 of 1.5 B, two of Llama 3 8B's and of 70B's width.
CASES = {"1b": (32_768, 2048), "8b": (16_384, 4096), "70b": (16_384, 8192), "tiny": (64, 128)}
EPS = 1e-5


def measure(names: Sequence[str]) -> Iterator[str]:
    """Lines of text: what is timed on what, then a line for each pass of each case."""
    yield f"{jax.devices()[0].device_kind}, jax {jax.__version__}, bfloat16"
    for name in names:
        yield from _case(name, CASES[name])


def _case(name: str, shape: tuple[int, int]) -> Iterator[str]:
    yield f"{name}: [{shape[0]}, {shape[1]}]"
    keys = jax.random.split(jax.random.key(0), 5)
    x, added, of_x, grad = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[:4])
    scale = jax.random.normal(keys[4], shape[1:], jnp.float32)
    capability = getattr(jax.devices()[0], "compute_capability", "9.0")
    reason = kernel.supported(x, platform=jax.default_backend(), compute_capability=capability)
    if reason:
        yield f"  ours is left out: {reason}"
    at: dict[str, Any] = dict(compute_capability=capability)
    ours = functools.partial(kernel.forward, eps=EPS, **at)
    ours_of_sum = functools.partial(kernel.forward_of_sum, eps=EPS, **at)
    ours_back = functools.partial(kernel.backward, **at)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=1) + EPS)
    # Of XLA and ours, the arrays of x's size that are read and written, and what is given.
    passes: dict[str, tuple[Callable, Callable, int, tuple]] = {
        "norm": (_norm, ours, 2, (x, scale)),
        "sum and norm": (_of_sum, ours_of_sum, 4, (x, added, scale)),
        "backward": (_backward, ours_back, 4, (x, scale, inverse, of_x, grad)),
    }
    for part, (theirs, mine, num, arrays) in passes.items():
        kinds = {"xla": theirs} if reason else {"xla": theirs, "ours": mine}
        jitted = {kind: jax.jit(function) for kind, function in kinds.items()}
        made = {kind: run(*arrays) for kind, run in jitted.items()}
        rivals = {f"{part}, {kind}": Rival(run, num * x.nbytes) for kind, run in jitted.items()}
        yield from lines_of(rivals, arrays)
        if reason is None:
            # Behind what XLA gives there are our statistics.
            pairs = zip(jax.tree.leaves(made["ours"]), jax.tree.leaves(made["xla"]), strict=False)
            yield "  off XLA's " + " ".join(f"{error(mine, wanted):.1e}" for mine, wanted in pairs)


_norm = functools.partial(kernel.reference, eps=EPS)


def _of_sum(x_MD, added_MD, scale_D):
    x_MD = x_MD + added_MD
    return x_MD, _norm(x_MD, scale_D)


def _backward(x_MD, scale_D, inverse_M, of_x_MD, grad_MD):
    del inverse_M
    # What comes out is not used, so no forward pass is made.
    dx_MD, dscale_D = jax.vjp(_norm, x_MD, scale_D)[1](grad_MD)
    return of_x_MD + dx_MD, dscale_D
