"""Measured figures for scripts/doctor.py: products, memory, collectives, disk, checkpoints.

With jax alone, as a run uses it. Loops run inside one program, with a number of turns that XLA does
not know, so that it neither unrolls nor merges them; each figure is the median of its repeats.
"""

import contextlib
import dataclasses
import logging
import math
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxscale import distributed
from jaxscale.checkpoint.checkpointer import Checkpointer

log = logging.getLogger(__name__)

MIB, GIB = 2**20, 2**30
BLOCK_BYTES = 16 * MIB
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce")
INSIDE, BETWEEN, ALL = "inside a host", "between hosts", "all"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured. matrix: the side of square matrices; seconds: of each card's loops.

    collective_bytes: of a device's buffer, from small to large; turn_seconds: of one timing.
    """

    matrix: int
    memory_bytes: int
    seconds: float
    collective_bytes: tuple[int, ...]
    turn_seconds: float
    repeats: int
    file_bytes: int


FULL = Sizes(
    matrix=8192,
    memory_bytes=2 * GIB,
    seconds=4.0,
    collective_bytes=(64 * MIB, 256 * MIB, GIB),
    turn_seconds=0.2,
    repeats=5,
    file_bytes=GIB,
)
QUICK = dataclasses.replace(
    FULL, seconds=1.5, collective_bytes=(256 * MIB,), repeats=3, file_bytes=GIB // 4
)
# A CPU's figures show that everything works, and no more.
CPU = Sizes(
    matrix=512,
    memory_bytes=32 * MIB,
    seconds=0.3,
    collective_bytes=(MIB, 4 * MIB),
    turn_seconds=0.05,
    repeats=3,
    file_bytes=32 * MIB,
)


@contextlib.contextmanager
def stage(name: str, *, seconds: float) -> Iterator[None]:
    """Says what is measured. Where that does not end, it is said, and this process ends with 1.

    A collective over a network that does not work waits for ever, in C++.
    """

    def give_up() -> None:
        process, num = jax.process_index(), jax.process_count()
        sys.stderr.write(
            f"\nerror: {name} did not end in {seconds:g} s (process {process} of {num}, host "
            f"{os.uname().nodename}); NCCL_DEBUG=INFO says which network it uses, docs/clusters.md "
            "which variables choose another\n"
        )
        sys.stderr.flush()
        os._exit(1)

    log.info("%s ...", name)
    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# One device.


def of_devices(
    devices: Sequence[jax.Device], sizes: Sizes, *, at_work: contextlib.AbstractContextManager
) -> list[dict[str, Any]]:
    """`matmul_tflops` (bf16) and `memory_gbs` (read and written) of each; all work at once.

    None, and `error`, of a device that cannot. at_work: entered while they make products, which
    draws the most power.
    """
    found: list[dict[str, Any]] = [{} for _ in devices]
    products = _prepared(_product_loop, devices, size=sizes.matrix, found=found)
    with at_work:
        product_seconds = _all_at_once(products, sizes, found=found)
    products.clear()
    passes = _prepared(_scale_loop, devices, size=sizes.memory_bytes, found=found)
    pass_seconds = _all_at_once(passes, sizes, found=found)
    for figures, product, one_pass in zip(found, product_seconds, pass_seconds, strict=True):
        work = 2 * 2 * sizes.matrix**3
        figures["matmul_tflops"] = product and work / product / 1e12
        figures["memory_gbs"] = one_pass and 2 * sizes.memory_bytes / one_pass / 1e9
    return found


Run = Callable[[int], None]


def _prepared(
    make: Callable[[jax.Device, int], Run],
    devices: Sequence[jax.Device],
    *,
    size: int,
    found: Sequence[dict[str, Any]],
) -> list[Run | None]:
    """Compiled one after the other: the first loads libraries."""
    runs: list[Run | None] = []
    for device, figures in zip(devices, found, strict=True):
        with _telling(figures):
            runs.append(make(device, size))
            continue
        runs.append(None)
    return runs


def _all_at_once(
    runs: Sequence[Run | None], sizes: Sizes, *, found: Sequence[dict[str, Any]]
) -> list[float | None]:
    def one(run: Run | None, figures: dict[str, Any]) -> float | None:
        with _telling(figures):
            return None if run is None else _sustained(run, sizes)
        return None

    with ThreadPoolExecutor(len(runs)) as threads:
        return list(threads.map(one, runs, found))


@contextlib.contextmanager
def _telling(figures: dict[str, Any]) -> Iterator[None]:
    """What XLA says of a device that cannot, such as one whose memory others have."""
    try:
        yield
    except RuntimeError as error:
        figures.setdefault("error", str(error).partition("\n")[0][:300])


@jax.jit
def product_chain(a, x, num):
    """a @ (a @ ... x), 2 * num products of square matrices.

    Two a turn: XLA writes the second over what the first has read, and copies nothing.
    """
    return lax.fori_loop(0, num, lambda _, x: a @ (a @ x), x)


@jax.jit
def scale_chain(x, factor, num):
    """x * factor * ..., each a pass over the memory."""
    return lax.fori_loop(0, num, lambda _, x: x * factor, x)


def _product_loop(device: jax.Device, side: int) -> Callable[[int], None]:
    """Runs so many products of a chain; random numbers, since zeros take less power and time."""
    keys = jax.device_put(jax.random.split(jax.random.key(0)), device)
    a, x = (jax.random.normal(key, (side, side), jnp.bfloat16) for key in keys)
    a = a / jnp.bfloat16(side**0.5)  # keeps the chain's numbers near 1

    def run(num: int) -> None:
        jax.block_until_ready(product_chain(a, x, np.int32(num)))

    run(1)
    return run


def _scale_loop(device: jax.Device, num_bytes: int) -> Callable[[int], None]:
    with jax.default_device(device):
        x = jnp.ones(num_bytes // 4, jnp.float32)
        factor = jnp.float32(1)

    def run(num: int) -> None:
        jax.block_until_ready(scale_chain(x, factor, np.int32(num)))

    run(1)
    return run


def _sustained(run: Callable[[int], None], sizes: Sizes) -> float:
    """Median seconds of a turn, over `sizes.seconds`."""
    num = turns(_timed(run, 1), sizes)
    began, found = time.perf_counter(), []
    while time.perf_counter() - began < sizes.seconds or len(found) < sizes.repeats:
        found.append(_timed(run, num) / num)
    return statistics.median(found)


def turns(seconds: float, sizes: Sizes) -> int:
    """How many make a timing, if one takes so long."""
    return max(1, min(1000, int(sizes.turn_seconds / max(seconds, 1e-6))))


def _timed(run: Callable[[int], None], num: int) -> float:
    began = time.perf_counter()
    run(num)
    return time.perf_counter() - began


# Several devices.


def mesh_of(devices: Sequence[jax.Device], host_of: Callable[[jax.Device], str]) -> Mesh:
    """Axes `host` and `gpu`; one row of all where hosts have different numbers of devices."""
    rows: dict[str, list[jax.Device]] = {}
    for device in devices:
        rows.setdefault(host_of(device), []).append(device)
    is_even = len({len(row) for row in rows.values()}) == 1
    grid = list(rows.values()) if is_even else [list(devices)]
    return Mesh(np.array(grid), ("host", "gpu"))


def groups_of(mesh: Mesh, *, num_hosts: int) -> dict[str, tuple[str, ...]]:
    """Which devices make a collective together: mesh axes by what they are called in the table."""
    hosts, gpus = mesh.shape["host"], mesh.shape["gpu"]
    groups: dict[str, tuple[str, ...]] = {}
    if gpus > 1:
        groups[INSIDE if hosts == num_hosts else ALL] = ("gpu",)
    if hosts > 1:
        groups[BETWEEN] = ("host",)
    if hosts > 1 and gpus > 1:
        groups[ALL] = ("host", "gpu")
    return groups


def of_collectives(
    mesh: Mesh, sizes: Sizes, *, groups: dict[str, tuple[str, ...]], patience: float
) -> list[dict[str, Any]]:
    """`group`, `collective`, `num` devices, `bytes`, `bus_gbs` as this process sees it.

    bus_gbs as nccl-tests have it: what a link must carry whatever the number of devices, bytes a
    second times (n - 1) / n, twice that for all-reduce. `bytes`: a device's buffer, of an
    all-gather the one that is filled. Every process calls it.
    """
    found = []
    for group, axes in groups.items():
        num = math.prod(mesh.shape[axis] for axis in axes)
        for collective in COLLECTIVES:
            with stage(f"{collective}, {group}", seconds=patience):
                for num_bytes in sizes.collective_bytes:
                    run = _collective_loop(collective, mesh, axes=axes, num_bytes=num_bytes)
                    seconds = _alike(run, sizes)
                    share = (num - 1) / num * (2 if collective == "all-reduce" else 1)
                    found.append(
                        {
                            "group": group,
                            "collective": collective,
                            "num": num,
                            "bytes": num_bytes,
                            "bus_gbs": num_bytes / seconds * share / 1e9,
                        }
                    )
    return found


def _collective_loop(
    collective: str, mesh: Mesh, *, axes: tuple[str, ...], num_bytes: int
) -> Callable[[int], None]:
    """Zeros: their sum needs no scaling, which would cost a pass over the memory."""
    loop, buffer = collective_program(collective, mesh, axes=axes, num_bytes=num_bytes)
    x = jax.jit(lambda: jnp.zeros(buffer.shape, buffer.dtype), out_shardings=buffer.sharding)()

    def run(num: int) -> None:
        jax.block_until_ready(loop(x, np.int32(num)))

    run(1)
    return run


def collective_program(
    collective: str, mesh: Mesh, *, axes: tuple[str, ...], num_bytes: int
) -> tuple[jax.stages.Wrapped, jax.ShapeDtypeStruct]:
    """The function (buffer, turns) -> buffer, and the buffer that it takes.

    A turn makes one collective among the devices of `axes`, and nothing else of any size.
    """
    num = math.prod(mesh.shape[axis] for axis in axes)
    part = num_bytes // 4 // num

    def turn(i, x):
        if collective == "all-reduce":
            return lax.psum(x, axes)
        made = lax.all_gather if collective == "all-gather" else lax.psum_scatter
        # All of it is made, one number goes on: the next turn has to wait for it.
        result = lax.optimization_barrier(made(x, axes, tiled=True))
        return lax.dynamic_update_slice(x, lax.dynamic_slice(result, (i % part,), (1,)), (0,))

    every, alike = PartitionSpec(("host", "gpu")), PartitionSpec()
    loop = jax.jit(
        jax.shard_map(
            lambda x, num: lax.fori_loop(0, num, turn, x),
            mesh=mesh,
            in_specs=(every, alike),
            out_specs=every,
            check_vma=False,
        )
    )
    own = part if collective == "all-gather" else part * num
    sharding = NamedSharding(mesh, every)
    return loop, jax.ShapeDtypeStruct((own * mesh.size,), jnp.float32, sharding=sharding)


def _alike(run: Callable[[int], None], sizes: Sizes) -> float:
    """Median seconds of a turn; every process makes as many."""
    (slowest,) = distributed.largest([_timed(run, 1)])
    num = turns(slowest, sizes)
    return statistics.median(_timed(run, num) / num for _ in range(sizes.repeats))


# Disks.


def of_disk(folder: Path, num_bytes: int) -> dict[str, float]:
    """`write_gbs`, onto the disk, and `read_gbs`, out of the page cache if that cannot be emptied.

    Raises OSError.
    """
    block = np.random.default_rng(0).bytes(min(BLOCK_BYTES, num_bytes))
    num = max(1, num_bytes // len(block))
    path = folder / f"doctor-{os.uname().nodename}-{os.getpid()}"
    try:
        began = time.perf_counter()
        with open(path, "wb", buffering=0) as file:
            for _ in range(num):
                file.write(block)
            os.fsync(file.fileno())
            written = time.perf_counter() - began
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        with open(path, "rb", buffering=0) as file:
            while file.read(len(block)):
                pass
        read = time.perf_counter() - began
    finally:
        path.unlink(missing_ok=True)
    size = num * len(block) / 1e9
    return {"write_gbs": size / written, "read_gbs": size / read, "gb": size}


def of_checkpoint(folder: Path, num_bytes: int) -> dict[str, float]:
    """`save_gbs`, until a step is whole and checked, and `restore_gbs`; of all processes together.

    folder: shared, and not there yet. num_bytes: of each device. Every process calls it. Raises
    CheckpointError, OSError.
    """
    mesh = Mesh(np.array(jax.devices()), ("device",))
    sharding = NamedSharding(mesh, PartitionSpec("device"))
    shape = (mesh.size, max(1, num_bytes // 4))
    make = jax.jit(
        lambda: jax.random.normal(jax.random.key(0), shape, jnp.float32), out_shardings=sharding
    )
    state = {"x": jax.block_until_ready(make())}
    wanted = {"x": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)}
    try:
        with Checkpointer(folder, keep_last=1) as checkpoints:
            began = time.perf_counter()
            checkpoints.save(1, state, metadata={})
            checkpoints.wait()
            saved = time.perf_counter() - began
            began = time.perf_counter()
            restored = checkpoints.restore(wanted)
            assert restored is not None
            jax.block_until_ready(restored[1])
            read = time.perf_counter() - began
        saved, read = distributed.largest([saved, read])
    finally:
        if distributed.is_lead():
            shutil.rmtree(folder, ignore_errors=True)
    size = 4 * math.prod(shape) / 1e9
    return {"save_gbs": size / saved, "restore_gbs": size / read, "gb": size}
