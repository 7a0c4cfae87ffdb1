"""What tests of grouped products share, in bfloat16 and in 8 bits."""

from typing import Any

import jax
import pytest

from jaxscale.kernels import grouped_programs, hopper
from tests.kernels.mosaic import IS_GPU

needs_kernel = pytest.mark.skipif(
    jax.__version_info__ < hopper.JAX, reason="jax has no interpreter of Mosaic GPU for it"
)
# Rows, and groups' sizes: tiles are of 128 rows, 64 a warpgroup, and begin at multiples of 8.
GROUPS: dict[str, tuple[int, list[int]]] = {
    "whole tiles": (256, [128, 128]),
    "all in one": (256, [0, 256, 0]),
    "end inside of tiles": (256, [100, 27, 129]),
    "one-row groups": (64, [1] * 9 + [55]),
    "empty ones": (136, [0, 9, 0, 0, 127, 0]),
    "rows of no group": (264, [70, 0, 30]),
    "nothing": (64, [0, 0]),
}


def make_few_programs(monkeypatch) -> None:
    """So that each makes several tiles."""
    if not IS_GPU:
        monkeypatch.setattr(grouped_programs, "PROGRAMS", 2)


def supported(kernel: Any, case: dict[str, Any]) -> str | None:
    """`kernel.supported` of x and w, (dtype, *shape) each, on a platform."""
    x, w = (jax.ShapeDtypeStruct(shape, dtype) for dtype, *shape in (case["x"], case["w"]))
    where = {name: case[name] for name in ("platform", "compute_capability")}
    return kernel.supported(x, w, **where)


def check_refused(kernel: Any, case: dict[str, Any], *, change: dict[str, Any], reason: str):
    """That the case is supported, and changed is not, for this reason."""
    assert supported(kernel, case) is None
    found = supported(kernel, case | change)
    assert found is not None and reason in found
