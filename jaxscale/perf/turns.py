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


def in_one_program(functions: Mapping[str, Callable], sets: Sequence[Sequence]) -> dict[str, float]:
    """Median milliseconds of a call of each: one of as many as there are sets, in one program.

    So a step runs what is too short for the host: launching a program takes it 50 us or more.
    """

    def each_set(function):
        return jax.jit(lambda sets: [function(*arrays) for arrays in sets])

    many = {name: each_set(function) for name, function in functions.items()}
    return {name: time / len(sets) for name, time in in_turns(many, (sets,)).items()}


def error(found: jax.Array, expected: jax.Array) -> float:
    """Of the whole array, relative to its norm."""
    found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
    return float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected))
