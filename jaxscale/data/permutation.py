"""Shuffling without a table: a keyed bijection of range(size), computed where it is asked for.

A table of row numbers for 15 T tokens at 8192 would be 14 GiB on every host, and building it would
hold up every start. This needs a few words of key and a fraction of a microsecond per number.
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

NUM_ROUNDS = 6

Words = NDArray[np.uint64]


def permute(numbers: ArrayLike, size: int, *, keys: Words) -> NDArray[np.int64]:
    """Where each of `numbers` (integers in range(size)) goes; int64, same shape, a bijection.

    A Feistel network over pairs (left, right) of range(side), side = ceil(sqrt(size)), walking on
    while a result lies outside range(size) (Black & Rogaway 2002, "Ciphers with Arbitrary Finite
    Domains", sections 3 and 4). side**2 exceeds size by at most 2 sqrt(size), so hardly any number
    walks twice; the usual power-of-two sides would make it up to four times.

    keys: uint64 [rounds], from `derive_keys`.
    """
    numbers = np.asarray(numbers)
    assert size > 0 and (numbers.size == 0 or 0 <= numbers.min() <= numbers.max() < size)
    side = np.uint64(math.isqrt(size - 1) + 1)
    flat = numbers.astype(np.uint64).ravel()
    walking = np.arange(flat.size)
    while walking.size:
        flat[walking] = _feistel(flat[walking], side, keys=keys)
        walking = walking[flat[walking] >= np.uint64(size)]
    return flat.astype(np.int64).reshape(numbers.shape)


def derive_keys(*entropy: int, num_keys: int = NUM_ROUNDS) -> Words:
    """uint64 [num_keys] from integers >= 0 such as (seed, epoch); the same on every machine."""
    words = np.random.SeedSequence(entropy).generate_state(num_keys, np.uint64)
    return np.asarray(words, np.uint64)


def _feistel(values: Words, side: np.uint64, *, keys: Words) -> Words:
    left, right = values // side, values % side
    for key in keys:
        left, right = right, (left + _mix(right ^ key) % side) % side
    return left * side + right


def _mix(words: Words) -> Words:
    # The finaliser of splitmix64 (Steele, Lea & Flood 2014): every input bit reaches every output
    # bit.
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
