"""From the loader's rows to global batches on the devices."""

import contextlib
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.config import Exchange
from jaxscale.data.batch import Batch
from jaxscale.data.loader import batches
from jaxscale.data.rows import TokenRows
from jaxscale.ops import deal
from jaxscale.step.plan import Plan

# The arrays of a Batch are [microbatches, rows, seq].
BATCH_AXES = "_ batch seq"


def device_batches(plan: Plan, rows: TokenRows, *, start: int) -> Generator[Batch, None, None]:
    """Global batches on the devices, from batch `start` on.

    Each host reads the rows of its own devices only.
    """
    shape, data = plan.batch_shape, plan.config.data
    num_microbatches, num_rows, _ = shape
    sharding = _sharding(plan)
    here = _local_rows(sharding, shape)
    loader = batches(
        rows,
        batch_size=num_microbatches * num_rows,
        start=start,
        local_rows=(np.arange(num_microbatches)[:, None] * num_rows + here).reshape(-1),
        prefetch=data.prefetch,
        threads=data.threads,
    )

    def place(rows, order):
        rows = np.asarray(rows)
        rows = rows if order is None else np.take_along_axis(rows, order, axis=1)
        local = rows.reshape(num_microbatches, len(here), -1)

        def fetch(index: Any) -> np.ndarray:
            wanted = np.arange(num_rows)[index[1]]
            return local[index[0], np.searchsorted(here, wanted)][:, :, index[2]]

        return jax.make_array_from_callback(shape, sharding, fetch)

    with contextlib.closing(loader):
        for _, batch in loader:
            order = _order_of(batch, plan)
            yield Batch(*(place(rows, order) for rows in batch))


def _order_of(batch: Batch, plan: Plan) -> np.ndarray | None:
    """Which tokens of each row are where on the devices; None: as they come."""
    if plan.execution.exchange == Exchange.ALL_TO_ALL:
        return None
    segments = np.asarray(batch.segments)
    return deal.order(segments, plan.mesh.shape["context"], balance=plan.execution.balance)


def abstract_batch(plan: Plan) -> Batch:
    """Shapes, dtypes and shardings of a batch."""
    array = jax.ShapeDtypeStruct(plan.batch_shape, jnp.int32, sharding=_sharding(plan))
    return Batch(array, array, array, array)


def abstract_limits(plan: Plan) -> dict[str, jax.ShapeDtypeStruct]:
    """Those of a step's limits that the plan's update takes, as the batch."""
    if not plan.config.bad_steps.spike:
        return {}
    whole = NamedSharding(plan.mesh, PartitionSpec())
    return {"loss_limit": jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)}


def _sharding(plan: Plan) -> NamedSharding:
    return NamedSharding(plan.mesh, plan.rules.spec(BATCH_AXES))


def _local_rows(sharding: NamedSharding, shape: tuple[int, int, int]) -> np.ndarray:
    """Sorted row numbers within a microbatch that this host's devices hold."""
    indices: Any = sharding.addressable_devices_indices_map(shape).values()
    return np.unique(np.concatenate([np.arange(shape[1])[index[1]] for index in indices]))
