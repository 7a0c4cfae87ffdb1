"""What our kernels for Hopper share (Pallas Mosaic GPU): where they run, and who does what."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

WARPGROUPS = 2  # that compute; one more copies
MULTIPROCESSORS = 132  # of an H100 or H200
# Query heads that share a key head and are made side by side, by programs of a cluster.
PAIR = "pair"
# The first jax whose Mosaic GPU lets a program write to an accumulator.
JAX = (0, 11, 2)

# jax 0.10.2 wants an index too; there these kernels are not used (`objection`).
load: Any = plgpu.load


def objection(kernel: str, *, platform: str, compute_capability: str) -> str | None:
    """None if the kernel of this name can run on this platform ("gpu"), else the reason."""
    if platform not in ("gpu", "cuda"):
        return f"{kernel} needs an NVIDIA GPU, not {platform}"
    if compute_capability != "9.0":
        return f"{kernel} is for compute capability 9.0, not {compute_capability}"
    if jax.__version_info__ < JAX:
        return f"{kernel} needs jax {'.'.join(map(str, JAX))}, not {jax.__version__}"
    return None


def run(program, warpgroups: int = WARPGROUPS) -> None:
    """Each warpgroup's part of a program with `compute` and `copy`."""
    warpgroup = lax.axis_index("warpgroup")
    pl.when(warpgroup < warpgroups)(program.compute)
    pl.when(warpgroup == warpgroups)(program.copy)


def heads_together(num_heads: int, num_key_heads: int, *, head_size: int) -> int:
    """The programs of a cluster: two where an even number of query heads share a key head.

    Both visit the same tiles of keys, and each loads half of both's (TMA's multicast): the L2 cache
    hands out half as much. Forward at head size 128 that takes 6% less time on an H200, and at 64,
    whose steps are half as long, no less: there each goes by itself.
    """
    return 2 if head_size > 64 and (num_heads // num_key_heads) % 2 == 0 else 1


def barrier_of_cluster(together: int, **options) -> Any:
    """One at which the programs of a cluster arrive. Where there is one program that would cost
    each arrival two shuffles."""
    if together == 1:
        return plgpu.Barrier(**options)
    return plgpu.ClusterBarrier(collective_axes=(PAIR,), **options)


def by_row(x, like):
    """One value for each row, as an array of the shape of `like`."""
    return lax.broadcast_in_dim(x, like.shape, [0])


def by_column(x, like):
    """One value for each column, as an array of the shape of `like`."""
    return lax.broadcast_in_dim(x, like.shape, [1])


def zeros(num_columns: int, dtype):
    """[64, num_columns], as a warpgroup's registers hold a product's operand and its sums."""
    return plgpu.layout_cast(jnp.zeros((64, num_columns), dtype), plgpu.Layout.WGMMA)


def wait_if(condition, barrier):
    """As `plgpu.barrier_wait`, where a condition holds."""
    pl.when(condition)(lambda: plgpu.barrier_wait(barrier))


def arrive_if(condition, barrier):
    """As `plgpu.barrier_arrive`, where a condition holds."""
    pl.when(condition)(lambda: plgpu.barrier_arrive(barrier))
