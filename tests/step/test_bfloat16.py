"""With bfloat16 a loss depends on the layout by no more than its sums' order."""

from typing import Any

import jax
import numpy as np
import pytest

# Sums of 500 tokens' losses in another order: 2e-7. Roundings that XLA leaves out: 2e-6 here.
LOSS_RTOL = 1e-6

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": dict(data=8, fsdp=1),
    "zero1": dict(fsdp=8, zero=1),
    "zero2": dict(fsdp=8, zero=2),
    "zero3": dict(fsdp=8),
    "zero3 auto": dict(fsdp=8, axis_types="auto"),
    "hsdp": dict(data=2, fsdp=4),
}


def test_the_first_loss_is_the_same_on_every_layout(run):
    first = {name: run(8, dtype="bfloat16", **layout).losses[0] for name, layout in LAYOUTS.items()}
    first["one device"] = run(1, dtype="bfloat16").losses[0]
    for name, loss in first.items():
        np.testing.assert_allclose(loss, first["one device"], rtol=LOSS_RTOL, err_msg=name)


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="its CPU back end leaves none out")
def test_where_xla_may_leave_roundings_out_it_is_not(run):
    loose = dict(dtype="bfloat16", xla_options=("xla_allow_excess_precision=true",))
    losses = [run(8, **loose, **layout).losses[0] for layout in LAYOUTS.values()]
    losses.append(run(1, **loose).losses[0])
    assert np.ptp(losses) > LOSS_RTOL * np.abs(losses[0])
