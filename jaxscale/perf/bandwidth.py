"""Functions that memory holds back: bytes a second, beside a copy's in the same run."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp

from jaxscale.perf.turns import in_turns


@dataclasses.dataclass(frozen=True)
class Rival:
    """num_bytes: what has to be read and written at least, however it is done."""

    function: Callable
    num_bytes: int


def lines_of(rivals: Mapping[str, Rival], arrays: Sequence[jax.Array]) -> Iterator[str]:
    """A line for a copy of the first array, then for each rival: it takes turns with the others."""
    copied = arrays[0]
    copy = jax.jit(jnp.negative)
    functions: dict[str, Callable] = {"copy": lambda *arrays: copy(arrays[0])}
    functions |= {name: rival.function for name, rival in rivals.items()}
    num_bytes = {"copy": 2 * copied.nbytes}
    num_bytes |= {name: rival.num_bytes for name, rival in rivals.items()}
    milliseconds = in_turns(functions, arrays)
    speeds = {name: num_bytes[name] / taken / 1e6 for name, taken in milliseconds.items()}
    for name, taken in milliseconds.items():
        share = speeds[name] / speeds["copy"]
        yield f"  {name:28s} {taken:8.3f} ms {speeds[name]:6.0f} GB/s  {share:4.0%} of a copy"


def size_of(tree) -> int:
    """Bytes of all arrays, or shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
