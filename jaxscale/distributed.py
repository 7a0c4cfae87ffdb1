"""The processes of one run: how they start, and how they agree on what all of them must do alike.

An agreement is a collective: every process calls it, in the same order, and all get the same
answer. In a run of one process it is a plain function.
"""

import collections
import contextlib
import functools
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed as jax_distributed  # its store of keys and values is not public
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxscale.launch import EXIT_AGAIN, EXPLICIT, Launch, detect, gpus_of, seconds_of
from jaxscale.watch.watched import Watched

log = logging.getLogger(__name__)

# How long a process waits for the others, and the variable that changes it.
JOIN_SECONDS = 60
PATIENCE = "JAXSCALE_JOIN_SECONDS"
# After that long without a word of JAX in a process the others abort. The watchdogs know sooner and
# say who and where; this is for networks that let only JAX through. JAX's own 100 s held 2 GPUs for
# 96 s (2 x H200).
HEARTBEAT_SECONDS = 25
HEARTBEAT = "JAXSCALE_HEARTBEAT_SECONDS"
# What gloo, NCCL and JAX's own service say in a process whose partner is gone. Which one that was
# is known a moment later, also where it takes a second to say why it ends.
BROKEN_COLLECTIVE = r"(?i)gloo|nccl|connection|unavailable|coordination service|aborted"
NAMING_SECONDS = 5.0
# What a process that fails has to close its files; a save in flight may wait for the others.
CLOSING_SECONDS = 20.0
INVITATION = "jaxscale/watch"

_watch: Watched | None = None


def initialize(command: str = "the same command") -> None:
    """Joins the other processes if the environment says there are any (`launch.detect`).

    Call before any device is touched. Raises ValueError for variables that cannot be. Where
    somebody is missing after JOIN_SECONDS (or `JAXSCALE_JOIN_SECONDS`) it says so and ends the
    process with exit code 2. From then on a process that is killed is named by the others, which
    end with `launch.EXIT_AGAIN`. command: what a message tells the user to run again.
    """
    launch = detect()
    if launch is None:
        return
    seconds, heartbeat = (
        seconds_of(PATIENCE, JOIN_SECONDS),
        seconds_of(HEARTBEAT, HEARTBEAT_SECONDS),
    )
    _find_host(launch, seconds=seconds if launch.launcher == "Kubernetes" else 0)
    if launch.process == 0:
        _check_free(launch)
    # Without one JAX listens on every network of the host.
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    bind = bind or (launch.address if launch.is_loopback else None)
    with _patience(launch, seconds):
        jax.distributed.initialize(
            coordinator_address=launch.address,
            num_processes=launch.num_processes,
            process_id=launch.process,
            local_device_ids=gpus_of(launch),
            # JAX's own detection would give a task of SLURM the GPU of its local number, also where
            # SLURM has hidden the others.
            cluster_detection_method="deactivate",
            initialization_timeout=2 * seconds,
            heartbeat_timeout_seconds=heartbeat,
            coordinator_bind_address=bind,
        )
    if jax.distributed.is_initialized():
        # Those that come back by themselves need no advice.
        comes_back = launch.launcher in ("SLURM", "Kubernetes")
        advice = "" if comes_back else f"continue with: {command}"
        _start_watch(launch, seconds=seconds, advice=advice)
        describe()


def _start_watch(launch: Launch, *, seconds: int, advice: str) -> None:
    """Says so where a network lets only JAX through: then its heartbeat is all there is."""
    global _watch
    client = jax_distributed.global_state.client
    assert client is not None
    _watch = Watched(launch.process, advice=advice)
    if launch.process == 0:
        host = launch.host if launch.is_loopback else ""
        client.key_value_set(INVITATION, _watch.lead(host, num_processes=launch.num_processes))
        return
    try:
        invitation = client.blocking_key_value_get(INVITATION, 1000 * seconds)
        _watch.follow(launch.host, invitation, num_processes=launch.num_processes)
    except OSError as error:
        log.warning(
            "process %d cannot reach process 0 on a port of its own (%s): that a process was "
            "killed or is stuck is noticed after %s seconds, and by JAX alone",
            launch.process,
            error,
            os.environ.get(HEARTBEAT, HEARTBEAT_SECONDS),
        )


def at(step: int | None, phase: str, *, allowed: float, batch: int = 0) -> None:
    """Tells the watchdog of this process, if it has one, where it is: see `Watched.at`."""
    if _watch is not None:
        _watch.at(step, phase, allowed=allowed, batch=batch)


@contextlib.contextmanager
def faults_end_all(tell: Callable[[BaseException], int], *, advice: str = "") -> Iterator[None]:
    """Where there are other processes, an exception inside ends this one at once, and tells them.

    They wait for it in a collective, and an ordinary exit would wait for them. tell: prints what
    the user is to know of the exception and returns the exit code. If the exception is only what
    another process's end looks like from here, that process is named instead. A process that is
    alone gets its watchdog here; advice: what it tells the user when it ends the process.
    """
    global _end, _watch
    if _watch is not None:
        _end = functools.partial(_end_all, tell=tell)
    else:
        _watch = Watched(0, advice=advice)
    try:
        yield
    except BaseException as error:
        _end(error)
        raise
    finally:
        _watch.close()


@contextlib.contextmanager
def closing_is_bounded() -> Iterator[None]:
    """Where there are others, an exception inside leaves CLOSING_SECONDS to close what is open.

    Then the process ends as in `faults_end_all`: closing may wait for the others as well.
    """
    try:
        yield
    except BaseException as error:
        timer = threading.Timer(CLOSING_SECONDS, _end, [error])
        timer.daemon = True
        timer.start()
        raise


def _end_all(error: BaseException, *, tell: Callable[[BaseException], int]) -> None:
    assert _watch is not None
    if re.search(BROKEN_COLLECTIVE, str(error)):
        time.sleep(NAMING_SECONDS)  # the watch ends this process meanwhile
    code = tell(error)
    is_signal = isinstance(error, KeyboardInterrupt | SystemExit)
    said = "" if is_signal else str(error).partition("\n")[0]
    _watch.report(said or f"{type(error).__name__}, exit code {code}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _goes_on(error: BaseException) -> None:
    """Of a process that is alone."""


_end: Callable[[BaseException], None] = _goes_on


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


def _find_host(launch: Launch, *, seconds: int) -> None:
    """Raises ValueError where the coordinator's host has no address.

    seconds: how long it may take to get one; that of a pod has it once the pod runs.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(launch.host, launch.port)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{launch.key}={launch.address!r}: host {launch.host!r} is not known here "
                    f"({error.strerror}); name the host of process 0"
                ) from None
        time.sleep(1.0)


def _check_free(launch: Launch) -> None:
    """Raises ValueError where process 0 cannot listen: jax would end the process in C++."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", launch.port))
        except OSError as error:
            raise ValueError(
                f"{launch.key}={launch.address!r}: port {launch.port} cannot be used here "
                f"({error.strerror}); choose another one, the same for all processes"
            ) from None


@contextlib.contextmanager
def _patience(launch: Launch, seconds: int) -> Iterator[None]:
    """Ends the process after so many seconds; jax itself would abort it, in C++."""

    def give_up():
        sys.stderr.write(
            f"\nerror: {_missing(launch)} after {seconds} s ({launch.launcher}: process "
            f"{launch.process} of {launch.num_processes}, coordinator {launch.address}); start "
            f"every process with the same coordinator and a number of its own, or set {PATIENCE} "
            "to wait longer\n"
        )
        sys.stderr.flush()
        # A launcher names all its processes: one that is missing was lost, nobody mistyped it.
        os._exit(2 if launch.launcher == EXPLICIT else EXIT_AGAIN)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _missing(launch: Launch) -> str:
    """Who has not come, as far as this process can know."""
    num = launch.num_processes
    if launch.process == 0:
        return (
            "process 1 is missing" if num == 2 else f"some of processes 1 to {num - 1} is missing"
        )
    try:
        socket.create_connection((launch.host, launch.port), timeout=2).close()
    except OSError:
        return f"process 0 does not answer at {launch.address}"
    return f"process 0 is there, but some other of the {num} processes is missing"


def is_lead() -> bool:
    """True in the one process that prints and writes for all."""
    return jax.process_index() == 0


# Agreements.


def largest(values: Sequence[float]) -> list[float]:
    """The largest of each value over all processes; with several processes rounded to float32."""
    if jax.process_count() == 1:
        return list(values)
    return every_process_has(np.array(values, np.float32)).max(axis=0).tolist()


def lead_says(numbers: Sequence[int]) -> list[int]:
    """The numbers of the lead process, each within int32; those of the others do not count."""
    if jax.process_count() == 1:
        return list(numbers)
    lengths = every_process_has(np.array([len(numbers)], np.int32))
    mine = np.zeros(lengths[0, 0], np.int32)
    if is_lead():
        mine[:] = numbers
    return every_process_has(mine)[0].tolist()


def every_process_says(text: str) -> list[str]:
    """The text of each process, in the order of their indices."""
    if jax.process_count() == 1:
        return [text]
    mine = np.frombuffer(text.encode(errors="replace"), np.uint8)
    lengths = every_process_has(np.array([mine.size], np.int32))[:, 0]
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: mine.size] = mine
    rows = every_process_has(padded)
    return [
        row[:length].tobytes().decode() for row, length in zip(rows, lengths.tolist(), strict=True)
    ]


def every_process_has(row: np.ndarray) -> np.ndarray:
    """[processes, ...]: the array of each process; all have the same shape and dtype.

    The dtype has 32 bits at most.
    """
    if jax.process_count() == 1:
        return row[None]
    if row.size == 0:
        return np.zeros((jax.process_count(), *row.shape), row.dtype)
    return np.asarray(multihost_utils.process_allgather(row))


def meet(place: str, trouble: str, *, timeout_seconds: float, lane: str = "") -> list[str]:
    """Waits for all processes at a place; what those that came with trouble said, and who they are.

    The same list on each. No collective: for threads beside the training, one meeting at a time in
    each lane. place: another one each time. Raises jax.errors.JaxRuntimeError if somebody does not
    come.
    """
    client = jax_distributed.global_state.client
    assert client is not None
    if trouble:
        me = f"process {jax.process_index()} (host {socket.gethostname()})"
        client.key_value_set(f"{place}/{jax.process_index():06}", f"{me}: {trouble}")
    # One name for all: the service keeps what it knows of each for ever.
    client.wait_at_barrier(f"jaxscale/meeting{lane}", round(1000 * timeout_seconds))
    return [said for _, said in sorted(client.key_value_dir_get(f"{place}/"))]


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
