"""What our Triton kernels share: where they run, and what jax-triton does not tell."""

import importlib.util

import jax
from jax import lax


def objection(*, platform: str, compute_capability: str, least: float) -> str | None:
    """None if the programs run on this platform ("gpu"), else the reason.

    least: the compute capability that they need.
    """
    if platform not in ("gpu", "cuda"):
        return f"it needs an NVIDIA GPU, not {platform}"
    if float(compute_capability) < least:
        return f"it needs compute capability {least} or more, not {compute_capability}"
    return missing()


def missing() -> str | None:
    """None if what compiles the programs is installed, else what is not."""
    names = [name for name in ("jax_triton", "triton") if not importlib.util.find_spec(name)]
    return f"it needs {' and '.join(names)}" if names else None


def as_varying(x, results):
    """jax-triton does not tell over which mesh axes a result varies: as x does."""
    wanted = jax.typeof(x).manual_axis_type.varying

    def varying(y):
        axes = tuple(wanted - jax.typeof(y).manual_axis_type.varying)
        return lax.pcast(y, axes, to="varying") if axes else y

    return [varying(y) for y in results]
