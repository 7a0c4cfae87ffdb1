"""Functions timed by turns on the same arrays, and how far results are off."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

# Calls of one timing, timings of which the median counts; functions take turns.
CALLS, TIMINGS = 8, 7


def in_turns(functions: Mapping[str, Callable], arrays: Sequence) -> dict[str, float]:
    """Median milliseconds of a call of each, compiled before."""
    timings: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        jax.block_until_ready(function(*arrays))
    for _ in range(TIMINGS):
        for name, function in functions.items():
            began = time.perf_counter()
            for _ in range(CALLS):
                out = function(*arrays)
            jax.block_until_ready(out)
            timings[name].append((time.perf_counter() - began) / CALLS)
    return {name: 1e3 * statistics.median(each) for name, each in timings.items()}


def error(found: jax.Array, expected: jax.Array) -> float:
    """Of the whole array, relative to its norm."""
    found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
    return float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected))
