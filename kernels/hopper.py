"""What our kernels for Hopper share (Pallas Mosaic GPU): where they run, and who does what."""

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

WARPGROUPS = 2  # that compute; one more copies
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


def by_row(x, like):
    """One value for each row, as an array of the shape of `like`."""
    return lax.broadcast_in_dim(x, like.shape, [0])


def by_column(x, like):
    """One value for each column, as an array of the shape of `like`."""
    return lax.broadcast_in_dim(x, like.shape, [1])
