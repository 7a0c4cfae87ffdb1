"""Functions timed by turns on the same arrays, and how far results are off."""

import collections
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

# Of a timing, and of what the function runs untimed before it: at its power limit a card's clock
# takes so long to follow the load. With eight calls and no more, one program of attention took 3.3
# to 4.6% longer behind itself than behind cuDNN's, which draws less power, on an H200, and cuDNN's
# 4% longer behind it than by itself (docs/kernels.md, "How it is timed").
SECONDS = 0.15
# Timings of which the median counts; functions take turns. Each time another is the first: in one
# order two copies of a program, the first and the third of four, were 4.6 and 5.0% apart on an H200
# (docs/kernels.md).
TIMINGS = 7
# Calls between waits; as many more are queued meanwhile, so that the GPU is never without.
CALLS = 8


def in_turns(functions: Mapping[str, Callable], arrays: Sequence) -> dict[str, float]:
    """Median milliseconds of a call of each, compiled before."""
    timings: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        jax.block_until_ready(function(*arrays))
    order = collections.deque(functions)
    for _ in range(TIMINGS):
        for name in order:
            _seconds_of_a_call(functions[name], arrays)
            timings[name].append(_seconds_of_a_call(functions[name], arrays))
        order.rotate(-1)
    return {name: 1e3 * statistics.median(each) for name, each in timings.items()}


def _seconds_of_a_call(function: Callable, arrays: Sequence) -> float:
    """Mean of calls for `SECONDS` at least."""
    began, num_calls, before = time.perf_counter(), 0, None
    while not num_calls or time.perf_counter() - began < SECONDS:
        for _ in range(CALLS):
            out = function(*arrays)
        num_calls += CALLS
        jax.block_until_ready(before)
        before = out
    jax.block_until_ready(before)
    return (time.perf_counter() - began) / num_calls


def in_one_program(functions: Mapping[str, Callable], sets: Sequence[Sequence]) -> dict[str, float]:
    """Median milliseconds of a call of each: one of as many as there are sets, in one program.

    So a step runs what is too short for the host: launching a program takes it 50 us or more.
    """

    def each_set(function):
        # As a function of the program it is traced and compiled once, not for each set: a kernel of
        # Mosaic GPU's takes 2.5 to 6 s of a CPU each time.
        function = jax.jit(function)
        return jax.jit(lambda sets: [function(*arrays) for arrays in sets])

    many = {name: each_set(function) for name, function in functions.items()}
    return {name: time / len(sets) for name, time in in_turns(many, (sets,)).items()}


def error(found: jax.Array, expected: jax.Array) -> float:
    """Of the whole array, relative to its norm."""
    found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
    return float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected))
