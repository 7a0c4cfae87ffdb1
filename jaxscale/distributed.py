"""The processes of one run: how they start, and how they agree on what all of them must do alike.

An agreement is a collective: every process calls it, in the same order, and all get the same
answer. In a run of one process it is a plain function.
"""

import collections
import os
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def initialize() -> None:
    """Joins the other processes if the environment says there are any.

    Call before any device is touched. SLURM: `SLURM_NTASKS` > 1 inside a job step. Elsewhere:
    `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`. Otherwise this process is
    the whole run.
    """
    in_step = int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_STEP_ID" in os.environ
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        jax.distributed.initialize(
            num_processes=_environment_int("JAX_NUM_PROCESSES"),
            process_id=_environment_int("JAX_PROCESS_ID"),
        )
    elif in_step:
        jax.distributed.initialize()


def _environment_int(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isdigit():
        raise ValueError(
            f"{name}={value!r} must be a whole number when JAX_COORDINATOR_ADDRESS is set"
        )
    return int(value)


def is_lead() -> bool:
    """True in the one process that prints and writes for all."""
    return jax.process_index() == 0


# Agreements.


def largest(values: Sequence[float]) -> list[float]:
    """The largest of each value over all processes; with several processes rounded to float32."""
    if jax.process_count() == 1:
        return list(values)
    return _of_every_process(np.array(values, np.float32)).max(axis=0).tolist()


def lead_says(numbers: Sequence[int]) -> list[int]:
    """The numbers of the lead process, each within int32; those of the others do not count."""
    if jax.process_count() == 1:
        return list(numbers)
    lengths = _of_every_process(np.array([len(numbers)], np.int32))
    mine = np.zeros(lengths[0, 0], np.int32)
    if is_lead():
        mine[:] = numbers
    return _of_every_process(mine)[0].tolist()


def every_process_says(text: str) -> list[str]:
    """The text of each process, in the order of their indices."""
    if jax.process_count() == 1:
        return [text]
    mine = np.frombuffer(text.encode(errors="replace"), np.uint8)
    lengths = _of_every_process(np.array([mine.size], np.int32))[:, 0]
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: mine.size] = mine
    rows = _of_every_process(padded)
    return [
        row[:length].tobytes().decode() for row, length in zip(rows, lengths.tolist(), strict=True)
    ]


def _of_every_process(row: np.ndarray) -> np.ndarray:
    """[processes, ...]: the array of each process; all have the same shape and dtype."""
    if row.size == 0:
        return np.zeros((jax.process_count(), *row.shape), row.dtype)
    return np.asarray(multihost_utils.process_allgather(row))


def any_process(flag: Callable[[], bool]) -> Callable[[], bool]:
    """A function that says whether `flag` was true on any process when they last called it.

    Every process calls it at the same places, such as once a step: one that stops alone leaves the
    others waiting in a collective. With several processes its answer is that of the call before
    (the first is False): the devices have long counted those votes, and never wait for the host.
    """
    if jax.process_count() == 1:
        return flag
    mesh = Mesh(np.array(jax.devices()), ("device",))
    by_device = NamedSharding(mesh, PartitionSpec("device"))
    count = jax.jit(jnp.any, out_shardings=NamedSharding(mesh, PartitionSpec()))
    votes: collections.deque[jax.Array] = collections.deque()

    def answer() -> bool:
        mine = np.full(mesh.size, flag())
        # JAX refuses arrays of another mesh than the one that the caller has set.
        with jax.set_mesh(mesh):
            votes.append(
                count(jax.make_array_from_callback(mine.shape, by_device, mine.__getitem__))
            )
        return len(votes) > 1 and bool(votes.popleft())

    return answer
