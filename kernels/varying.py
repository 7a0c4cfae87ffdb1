"""What kernels do not tell themselves: over which mesh axes their results vary."""

import jax
from jax import lax


def as_operands(y, *operands):
    """A kernel's result, which varies over the manual mesh axes that its operands vary over."""
    axes: set[str] = set()
    for operand in operands:
        axes |= jax.typeof(operand).manual_axis_type.varying
    axes -= jax.typeof(y).manual_axis_type.varying
    return lax.pcast(y, tuple(axes), to="varying") if axes else y
