"""Updates compiled without the code of our kernels, which is most of compiling them."""

import contextlib
from unittest import mock

import jax

from jaxscale.kernels import hopper

# JAX's, which older ones have not.
RULE = "mpmd_map_mgpu_lowering_rule"
if jax.__version_info__ >= hopper.JAX:
    from jax._src.pallas.mosaic_gpu import pallas_call_registration as registration

    lower_whole = getattr(registration, RULE)


@contextlib.contextmanager
def kernels_without_bodies():
    """Context: kernels of Mosaic GPU are called as they are, with all their arrays, and do nothing.

    For what reads a program around them: it is the same, which `test_ahead.py` compares, and takes
    8 s of a core to compile for the 8B update instead of 20 (jax 0.11.2). That kernels are compiled
    in each kind of region is for tests with whole ones: `test_deterministic_ahead.py`, blocks of
    `test_fp8_ahead.py`, `test_grouped_ahead.py`.
    """
    if jax.__version_info__ < hopper.JAX:
        yield
        return

    def lower_empty(context, *args, jaxprs, **options):
        empty = [jaxpr.replace(eqns=[]) for jaxpr in jaxprs]
        return lower_whole(context, *args, jaxprs=empty, **options)

    with mock.patch.object(registration, RULE, lower_empty):
        yield


@contextlib.contextmanager
def kernels_with_bodies():
    """Context: kernels are whole again, inside of the other context."""
    with mock.patch.object(registration, RULE, lower_whole):
        yield
