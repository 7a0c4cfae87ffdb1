"""Kernels of Mosaic GPU where no GPU is: interpreted, with their races looked for.

jax 0.11.2's interpreter lacks what flash attention needs: products whose left operand is in
registers, writes to accumulators, registers by other names, and TMA's additions. `interpreted` adds
them. Products are done at once here, so a wait that is missing is not found; what a product reads
of shared memory is looked at for races, as what TMA reads. A copy for all programs of a cluster is
one of each of them for itself there; that it comes when the others have read what was there before
is looked for.
"""

import contextlib
import functools
import importlib
import threading
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu

from jaxscale.kernels import flash_dq_sums

plgpu: Any = mosaic_gpu  # jax 0.10.2 has no interpreter there
IS_GPU = jax.default_backend() == "gpu"
ADDITIONS = threading.Lock()
THIS_THREAD = threading.local()
# Of a buffer that all programs of a cluster have: places that were loaded for all, by each program;
# what products read: whose, where, of how many tiles so far, when; who was not waited for.
LOADED: dict[tuple, list[tuple]] = {}
READ: dict[tuple, list[tuple]] = {}
NOT_WAITED_FOR: list[str] = []


def part_of_jax(name: str) -> Any:
    """Late: jax 0.10.2 has none of the interpreter's."""
    return importlib.import_module(f"jax._src.{name}")


def callbacks() -> Any:
    return part_of_jax("pallas.mosaic_gpu.interpret.gpu_callbacks")


def interpreter() -> Any:
    return part_of_jax("pallas.mosaic_gpu.interpret.jaxpr_interpret")


@contextlib.contextmanager
def interpreted():
    """Where there is no GPU. Fails for two warpgroups that meet in memory unprotected."""
    if IS_GPU:
        yield
        return
    gpu_callbacks, program = callbacks(), interpreter().JaxprInterpreter
    primitives = part_of_jax("pallas.mosaic_gpu.primitives")
    barrier = part_of_jax("pallas.mosaic_gpu.interpret.shared_memory").Barrier
    swap = functools.partial(_interpret_swap, program._interpret_swap_p)
    copy = functools.partial(_copy_or_add, gpu_callbacks.copy_smem_to_gmem)
    task = functools.partial(_task, gpu_callbacks.AsyncCopySmemToGmemTask)
    load = functools.partial(_load_for_all, program._interpret_copy_gmem_to_smem_p)
    finished = functools.partial(_cluster_finished, gpu_callbacks.cluster_finished)
    NOT_WAITED_FOR.clear()
    with (
        mock.patch.object(flash_dq_sums, "as_held", as_held),
        mock.patch.object(part_of_jax("callback"), "io_callback_impl", _call_back),
        mock.patch.object(primitives, "wgmma_accumulator_store", _store_accumulator),
        mock.patch.object(program, "_interpret_wgmma_ref_p", _interpret_product),
        mock.patch.object(program, "_interpret_swap_p", lambda *operands: swap(*operands)),
        mock.patch.object(
            program, "_interpret_copy_gmem_to_smem_p", lambda *operands: load(*operands)
        ),
        mock.patch.object(gpu_callbacks, "cluster_finished", finished),
        mock.patch.object(gpu_callbacks, "copy_smem_to_gmem", copy),
        mock.patch.object(gpu_callbacks, "AsyncCopySmemToGmemTask", task),
        mock.patch.object(barrier, "deallocate", _release),
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)),
    ):
        yield
    assert not gpu_callbacks.get_races().races_found
    assert not NOT_WAITED_FOR, NOT_WAITED_FOR[:3]


def _call_back(*arguments, callback, **_):
    """As jax's, which puts what it is given on a device first: the interpreter's 2,800 calls of a
    backward pass took 10 to 12 s so, and take 4 to 6."""
    given = (
        x.item() if x.ndim == 0 and x.dtype.kind in "iu" else x for x in map(np.asarray, arguments)
    )
    return jax.tree.map(np.asarray, callback(*given))


def as_held(values):
    """A part of dq as threads hold it, where no thread holds anything."""
    of = flash_dq_sums
    x = values.reshape(of.WARPS, of.HALVES, of.ROWS, -1, of.BLOCKS, of.LANES, of.COLUMNS)
    return x.transpose(3, 1, 0, 2, 5, 4, 6).reshape(of.part_shape(values.shape[1]))


def _release(barrier):
    """At a program's end, when nobody waits any more for what was used last."""
    with barrier.cv:
        barrier.ref_count -= 1


def _store_accumulator(accumulator, value):
    tree = jax.tree.structure(())
    part_of_jax("state.primitives").swap_p.bind(accumulator, value, tree=tree)


def _call(program, function, eqn, token, **operands):
    return part_of_jax("callback").io_callback(
        functools.partial(function, source_info=eqn.source_info),
        callbacks().TOKEN_SHAPE_DTYPE,
        token=token,
        mesh_location=program.mesh_location,
        thread=program.thread,
        **operands,
    )


def _interpret_swap(in_memory, self, eqn, token, get_invals):
    core = part_of_jax("pallas.mosaic_gpu.core")
    if not isinstance(eqn.invars[0].aval, core.WGMMAAbstractAccumulatorRef):
        return in_memory(self, eqn, token, get_invals)
    accumulator, values = get_invals()
    token = _call(self, _store, eqn, token, accumulator=accumulator, values=values)
    return token, [values]


def _store(*, token, mesh_location, thread, accumulator, values, source_info):
    gpu_callbacks = callbacks()
    memory = gpu_callbacks._get_shared_memory()
    key = gpu_callbacks.HostAllocationKey.from_array(accumulator)
    info = gpu_callbacks.memory.GPULoggingInfo(mesh_location, thread, source_info)
    place = key, memory.access(key, ())
    memory.store_buffer_content(*place, np.array(values), thread, logging_info=info)
    return token


def _interpret_product(self, eqn, token, get_invals):
    acc, a, b, *leaves = get_invals()
    names = (f"{name}_transforms_tree" for name in ("acc", "a", "b"))
    trees = [eqn.params[name] or jax.tree.structure([]) for name in names]
    transforms = jax.tree.unflatten(jax.tree_util.treedef_tuple(trees), leaves)
    given = zip(eqn.invars[:3], (acc, a, b), transforms, strict=True)
    places = [interpreter().resolve_ref(variable.aval, *place) for variable, *place in given]
    operands, transforms = zip(*places, strict=True)
    is_in_memory = hasattr(eqn.invars[1].aval, "inner_aval")
    multiply = functools.partial(_multiply, is_in_memory=is_in_memory)
    token = _call(self, multiply, eqn, token, operands=operands, transforms=transforms)
    return token, []


def _multiply(*, token, mesh_location, thread, operands, transforms, is_in_memory, source_info):
    gpu_callbacks = callbacks()
    memory = gpu_callbacks._get_shared_memory()
    info = gpu_callbacks.memory.GPULoggingInfo(mesh_location, thread, source_info)

    def place_of(operand, transforms):
        transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
        key = gpu_callbacks.HostAllocationKey.from_array(operand)
        return key, memory.access(key, transforms)

    def read(operand, transforms):
        place = place_of(operand, transforms)
        values, _, _ = memory.get_buffer_content(*place, thread, logging_info=info)
        # As TMA reads: what threads wrote must have been committed.
        with memory.lock:
            clock = memory.clocks[thread]
            clock.inc(memory.thread_to_vc_position(thread))
            now = clock.async_smem_clock.copy()
            at = clock.generic_clock.clock.copy()
        gpu_callbacks.get_races().check_read(thread, now, *place, source_info=source_info)
        key, access = place
        with ADDITIONS:
            seen = key.block_id, access.range, _number(key, access), at
            READ.setdefault(_of_all(key), []).append(seen)
        return values

    acc, a, b = operands
    a = read(a, transforms[1]) if is_in_memory else np.asarray(a)
    b, place = read(b, transforms[2]), place_of(acc, transforms[0])
    sums, _, _ = memory.get_buffer_content(*place, thread, logging_info=info)
    # Overflow is a case to test; as an error in this thread it would stop all for good.
    with np.errstate(all="ignore"):
        sums = sums + np.matmul(a.astype(sums.dtype), b.astype(sums.dtype))
    memory.store_buffer_content(*place, sums, thread, logging_info=info)
    return token


def _of_all(key) -> tuple:
    """A buffer of each program of a cluster."""
    return key.memory_space_id, key.device_id, key.thread_id, key.buffer_id


def _load_for_all(load, self, eqn, token, get_invals):
    if eqn.params["collective_axes"]:
        invals, params = get_invals(), eqn.params
        begin = 3 + params["src_transforms_treedef"].num_leaves
        tree = params["dst_transforms_treedef"]
        transforms = jax.tree.unflatten(tree, invals[begin : begin + tree.num_leaves])
        target, transforms = interpreter().resolve_ref(eqn.invars[1].aval, invals[1], transforms)
        options = dict(target=target, transforms=transforms)
        token = _call(self, _look_for_readers, eqn, token, **options)
    return load(self, eqn, token, get_invals)


def _look_for_readers(*, token, mesh_location, thread, target, transforms, source_info):
    """Other programs' of what this one is about to load over."""
    gpu_callbacks = callbacks()
    memory = gpu_callbacks._get_shared_memory()
    key = gpu_callbacks.HostAllocationKey.from_array(target)
    transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
    access = memory.access(key, transforms)
    now = memory.get_clock(thread).generic_clock.clock
    with ADDITIONS:
        for program, places, number, at in READ.get(_of_all(key), []):
            # On a GPU another cannot read this tile yet; here it has loaded one for itself.
            is_before = program != key.block_id and number <= _number(key, access)
            if is_before and _overlap(places, access.range) and not (at <= now).all():
                NOT_WAITED_FOR.append(f"program {program} may still read {access.range}")
        LOADED.setdefault((key.block_id, *_of_all(key)), []).append(access.range)
    return token


def _number(key, access) -> int:
    """How many tiles a program has loaded there for all."""
    loaded = LOADED.get((key.block_id, *_of_all(key)), [])
    return sum(_overlap(places, access.range) for places in loaded)


def _overlap(one, other) -> bool:
    def bounds(place):
        return (place, place + 1) if isinstance(place, int) else (place.start, place.stop)

    pairs = ((bounds(a), bounds(b)) for a, b in zip(one, other, strict=True))
    return all(a < d and c < b for (a, b), (c, d) in pairs)


def _cluster_finished(finished, *, token):
    READ.clear()
    LOADED.clear()
    return finished(token=token)


def _copy_or_add(copy, *, reduction_op, **options):
    assert reduction_op in (None, "add")
    THIS_THREAD.adds = reduction_op == "add"
    return copy(reduction_op=None, **options)


def _task(copies, **options):
    return (_additions(copies) if THIS_THREAD.adds else copies)(**options)


@functools.cache
def _additions(copies: Any):
    class Addition(copies):
        """Additions of several programs to one place are no race."""

        def __call__(self, tma_thread_id):
            memory = callbacks()._get_shared_memory()
            content = functools.partial(memory.get_buffer_content, logging_info=self.logging_info)
            self.pre_read(tma_thread_id, memory)
            values, _, _ = content(self.src_allocation_key, self.src_access, self.thread)
            self.clock.inc(tma_thread_id)
            self.write_clock = self.clock.copy()
            target = self.dst_allocation_key, self.dst_access
            with ADDITIONS:
                before, _, _ = content(*target, self.thread)
                memory.store_buffer_content(
                    *target, before + values, self.thread, logging_info=self.logging_info
                )
            self.post_write(tma_thread_id, memory)

    return Addition
