"""What holds of every kernel of Mosaic GPU that is compiled here."""

import jax
import pytest

from jaxscale.kernels import hopper
from tests.compile.bodies import kernels_without_bodies


@pytest.fixture(autouse=True)
def warps_pass_on_nothing(monkeypatch):
    """No reduction goes from warp to warp of a warpgroup.

    Pallas gives it one place in shared memory for all warpgroups, which then overwrite each other's
    (jax 0.11.2): no interpreter sees that, and on GPUs results differ from run to run.
    """
    if jax.__version_info__ < hopper.JAX:
        return
    from jax.experimental.mosaic.gpu import fragmented_array

    reduce = fragmented_array.FragmentedArray.reduce

    def without_a_place(self, op, axis, scratch=None, **options):
        return reduce(self, op, axis, None, **options)  # JAX raises an error where it needs one

    monkeypatch.setattr(fragmented_array.FragmentedArray, "reduce", without_a_place)


@pytest.fixture(scope="module")
def without_bodies():
    """For a file's `pytestmark`, before whatever else of the module."""
    with kernels_without_bodies():
        yield
