"""What our Triton kernels share: where they run, and how they are called."""

import importlib.util

from jaxscale.kernels import varying


def objection(*, platform: str, compute_capability: str, least: float) -> str | None:
    """None if the programs run on this platform ("gpu") as it is installed, else the reason.

    least: the compute capability that they need.
    """
    device = dict(platform=platform, compute_capability=compute_capability)
    return objection_to_device(**device, least=least) or missing()


def objection_to_device(*, platform: str, compute_capability: str, least: float) -> str | None:
    """As `objection`, whatever is installed."""
    if platform not in ("gpu", "cuda"):
        return f"it needs an NVIDIA GPU, not {platform}"
    if float(compute_capability) < least:
        return f"it needs compute capability {least} or more, not {compute_capability}"
    return None


def missing() -> str | None:
    """None if what compiles the programs is installed, else what is not."""
    names = [name for name in ("jax_triton", "triton") if not importlib.util.find_spec(name)]
    return f"it needs {' and '.join(names)}" if names else None


def call(x, *operands, compute_capability: str, **settings) -> list:
    """`jax_triton.triton_call`'s results, which vary over the mesh axes that x varies over.

    compute_capability: such as "9.0"; given, it compiles where no GPU is.
    """
    import jax_triton

    capability = round(10 * float(compute_capability))
    made = jax_triton.triton_call(x, *operands, compute_capability=capability, **settings)
    return [varying.as_operands(y, x) for y in made]
