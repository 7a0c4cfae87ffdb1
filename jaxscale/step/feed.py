"""From the loader's rows to global batches on the devices."""

import contextlib
from collections.abc import Generator
from typing import Any

import jax
import numpy as np

from jaxscale import sharding as shd
from jaxscale.data.batch import Batch
from jaxscale.data.loader import batches
from jaxscale.data.rows import TokenRows
from jaxscale.step.state import Plan
from jaxscale.step.update import BATCH_AXES


def device_batches(plan: Plan, rows: TokenRows, *, start: int) -> Generator[Batch, None, None]:
    """Global batches on the devices, from batch `start` on; each host reads the rows of its own devices only."""
    config = plan.config
    num_microbatches = config.grad_accumulation
    shape = (num_microbatches, config.batch_size // num_microbatches, config.seq_len)
    here = _local_rows(plan, shape)
    local_rows = (np.arange(num_microbatches)[:, None] * shape[1] + here).reshape(-1)
    data = config.data
    loader = batches(
        rows,
        batch_size=config.batch_size,
        start=start,
        local_rows=local_rows,
        prefetch=data.prefetch,
        threads=data.threads,
    )

    def place(rows):
        local = np.asarray(rows).reshape(num_microbatches, len(here), config.seq_len)

        def fetch(index: Any) -> np.ndarray:
            wanted = np.arange(shape[1])[index[1]]
            return local[index[0], np.searchsorted(here, wanted)][:, :, index[2]]

        return shd.global_array(fetch, shape, BATCH_AXES, mesh=plan.mesh, rules=plan.rules)

    with contextlib.closing(loader):
        for _, batch in loader:
            yield Batch(*map(place, batch))


def _local_rows(plan: Plan, shape) -> np.ndarray:
    """Sorted row numbers within a microbatch that this host's devices hold."""
    sharding = jax.sharding.NamedSharding(plan.mesh, plan.rules.spec(BATCH_AXES))
    indices: Any = sharding.addressable_devices_indices_map(shape).values()
    return np.unique(np.concatenate([np.arange(shape[1])[index[1]] for index in indices]))
