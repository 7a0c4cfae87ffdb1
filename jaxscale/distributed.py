"""The processes of one run: how they start, and how they agree on what all of them must do alike.

An agreement is a collective: every process calls it, in the same order, and all get the same
answer. In a run of one process it is a plain function.
"""

import collections
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# How long a process waits for the others, and the variable that changes it.
JOIN_SECONDS = 60
PATIENCE = "JAXSCALE_JOIN_SECONDS"


def initialize() -> None:
    """Joins the other processes if the environment says there are any.

    Call before any device is touched. SLURM: `SLURM_NTASKS` > 1 inside a job step. Elsewhere:
    `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`. Otherwise this process is
    the whole run. Raises ValueError for variables that cannot be. Where somebody is missing after
    JOIN_SECONDS (or `JAXSCALE_JOIN_SECONDS`) it says so and ends the process with exit code 2.
    """
    in_step = int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_STEP_ID" in os.environ
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        address = os.environ["JAX_COORDINATOR_ADDRESS"]
        num, mine = _environment_int("JAX_NUM_PROCESSES"), _environment_int("JAX_PROCESS_ID")
        if mine >= num:
            raise ValueError(
                f"JAX_PROCESS_ID={mine} must be below JAX_NUM_PROCESSES={num}: they count from 0"
            )
        place = _place_of(address)
        if mine == 0:
            _check_free(address, place[1])
        with _patience(lambda: _missing(place, num=num, mine=mine)) as seconds:
            jax.distributed.initialize(
                num_processes=num, process_id=mine, initialization_timeout=2 * seconds
            )
    elif in_step:
        with _patience(lambda: "some task of the SLURM step is missing") as seconds:
            jax.distributed.initialize(initialization_timeout=2 * seconds)
    if jax.distributed.is_initialized():
        describe()


def describe() -> str:
    """Devices, their platform, jax's version and the processes, in a line.

    Raises ValueError where the platform that was asked for is not here.
    """
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # jax asserts that CUDA's plugin is there
        asked = os.environ.get("JAX_PLATFORMS", "")
        reason = str(error).partition("\n")[0] or "its plugin is not installed"
        raise ValueError(
            f"JAX_PLATFORMS={asked!r} finds no device: {reason}. Unset it to take what is here, or "
            "install what it needs (GPUs: jaxscale[cuda12] or jaxscale[cuda13], and their driver)"
        ) from None
    kinds = ", ".join(sorted({device.device_kind for device in devices}))
    processes = jax.process_count()
    return (
        f"jax {jax.__version__} on {devices[0].platform}: {len(devices)} x {kinds}, "
        f"{processes} process{'es' if processes > 1 else ''}"
    )


def _environment_int(name: str) -> int:
    value = os.environ.get(name, "")
    if not (value.isascii() and value.isdigit()):
        raise ValueError(
            f"{name}={value!r} must be a whole number when JAX_COORDINATOR_ADDRESS is set"
        )
    return int(value)


def _place_of(address: str) -> tuple[str, int]:
    """Host and port. Raises ValueError for an address that has none, or a host without a name."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise ValueError(
            f"JAX_COORDINATOR_ADDRESS={address!r}: write host:port, the port from 1 to 65535, "
            "such as node0:29500"
        )
    try:
        socket.getaddrinfo(host, int(port))
    except OSError as error:
        raise ValueError(
            f"JAX_COORDINATOR_ADDRESS={address!r}: host {host!r} is not known here "
            f"({error.strerror}); name the host of process 0"
        ) from None
    return host, int(port)


def _check_free(address: str, port: int) -> None:
    """Raises ValueError where process 0 cannot listen: jax would end the process in C++."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ValueError(
                f"JAX_COORDINATOR_ADDRESS={address!r}: port {port} cannot be used here "
                f"({error.strerror}); choose another one, the same for all processes"
            ) from None


@contextlib.contextmanager
def _patience(missing: Callable[[], str]) -> Iterator[int]:
    """Ends the process after the seconds that it yields; jax itself would abort it, in C++."""
    seconds = _environment_int(PATIENCE) if PATIENCE in os.environ else JOIN_SECONDS

    def give_up():
        sys.stderr.write(
            f"\nerror: {missing()} after {seconds} s; start every process with the same "
            "JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES and a JAX_PROCESS_ID of its own, or set "
            f"{PATIENCE} to wait longer\n"
        )
        sys.stderr.flush()
        os._exit(2)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield seconds
    finally:
        timer.cancel()


def _missing(place: tuple[str, int], *, num: int, mine: int) -> str:
    """Who has not come, as far as this process can know."""
    if mine == 0:
        return (
            "process 1 is missing" if num == 2 else f"some of processes 1 to {num - 1} is missing"
        )
    try:
        socket.create_connection(place, timeout=2).close()
    except OSError:
        return f"process 0 does not answer at {place[0]}:{place[1]}"
    return f"process 0 is there, but some other of the {num} processes is missing"


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
