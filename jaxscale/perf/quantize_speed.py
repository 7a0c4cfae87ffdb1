"""Rounding to 8 bits, both ways at once, timed beside XLA's and checked against it bit by bit.

M rows, K columns.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.kernels import quantize
from jaxscale.kernels.quantize import STRAIGHT, TURNED, WAYS
from jaxscale.ops import fp8
from jaxscale.perf.bandwidth import Rival, lines_of, size_of

# Of a layer of Llama 3 8B: what comes backwards through gate or up, through qkv, and the residual
# stream's gradient. More tokens than 16,384 where a launch would be shorter than its dispatch.
CASES = {
    "gate": (16384, 14336),
    "qkv": (32768, 6144),
    "residual": (65536, 4096),
    "tiny": (128, 256),
}
# What every program of a run is compiled with: else XLA leaves out the rounding on GPUs.
EXACT = {"xla_allow_excess_precision": False}


def measure(names: Sequence[str]) -> Iterator[str]:
    """Lines of text: what is timed on what, then a line for each way of each case."""
    yield f"{jax.devices()[0].device_kind}, jax {jax.__version__}, bfloat16 to float8_e4m3fn"
    for name in names:
        yield from _case(name, CASES[name])


def _case(name: str, shape: tuple[int, int]) -> Iterator[str]:
    yield f"{name}: [{shape[0]}, {shape[1]}]"
    x_MK = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    x_MK *= jnp.exp2(jax.random.randint(jax.random.key(1), (shape[0], 1), -20, 20)).astype(
        x_MK.dtype
    )
    scale = jax.jit(functools.partial(fp8.scale_for, dtype=fp8.FORWARD, runs=shape))(x_MK)
    scale = scale.reshape(())
    kinds: dict[str, dict[str, Any]] = {
        "blocks, both ways": dict(ways=WAYS),
        "blocks, as it is": dict(ways=(STRAIGHT,)),
        "blocks, turned": dict(ways=(TURNED,)),
        "one scale, both ways": dict(ways=WAYS, scale=scale),
        "one scale, turned": dict(ways=(TURNED,), scale=scale),
    }
    for kind, how in kinds.items():
        yield from _kind(kind, x_MK, how=how)


def _kind(kind: str, x_MK, *, how: dict) -> Iterator[str]:
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", "9.0")
    xla = jax.jit(_of_one_array(quantize.reference, **how), compiler_options=EXACT)
    functions: dict[str, Callable] = {"xla": xla}
    reason = quantize.supported(
        x_MK,
        platform=jax.default_backend(),
        compute_capability=capability,
        has_scale="scale" in how,
    )
    if reason is None:
        ours = functools.partial(quantize.quantize, compute_capability=capability)
        functions["ours"] = jax.jit(_of_one_array(ours, **how))
    made = {name: function(x_MK) for name, function in functions.items()}
    num_bytes = size_of(x_MK) + size_of(made["xla"])
    rivals = {f"{kind}, {name}": Rival(function, num_bytes) for name, function in functions.items()}
    yield from lines_of(rivals, (x_MK,))
    if reason is not None:
        yield f"  ours is left out: {reason}"
    else:
        yield f"  {_difference(made['ours'], made['xla'])}"


def _of_one_array(function: Callable, **how) -> Callable:
    return lambda x_MK: function(x_MK, fp8.FORWARD, **how)


def _difference(found, expected) -> str:
    """Of all bytes, and of all scales."""
    off = [
        int(jnp.sum(_bits(mine) != _bits(wanted)))
        for mine, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    ]
    return "the same bits" if not any(off) else f"WRONG: {off} numbers differ"


def _bits(x):
    return jax.lax.bitcast_convert_type(x, jnp.uint8 if x.dtype.itemsize == 1 else jnp.uint32)
