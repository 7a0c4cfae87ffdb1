"""Whether an update fits the devices' memory: XLA compiles it and says, before any allocation.

`config.remat="auto"` becomes the richest policy that fits. An update that cannot fit is refused
with settings that would.
"""

import dataclasses
import functools
import logging
import math
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxscale import distributed
from jaxscale import sharding as shd
from jaxscale.compile import choice, refusal
from jaxscale.config import Remat
from jaxscale.step.feed import abstract_batch, abstract_limits
from jaxscale.step.plan import Plan
from jaxscale.xla.environment import host_memory_gib

log = logging.getLogger(__name__)

# Richest first. Without `none`, which keeps the gathered weights of every layer.
POLICIES = refusal.POLICIES[1:]
# Of JAX's pool. XLA's figure is of this very program; the rest is for the next batch and for what
# fragmentation costs: the largest peak that was measured is 1.8 GiB above the figure.
USABLE = 0.97
# Instructions that XLA's rematerialisation has added, in the text of a program:
# `%fusion.12.remat2 = `. Near a limit of its own XLA recomputes and gives up overlap.
RECOMPUTED = re.compile(r"%[\w.-]+\.remat[\d.]* = ")


@dataclasses.dataclass(frozen=True)
class CompiledUpdate:
    """A plan's update, compiled. GiB are of the fullest device and predicted.

    compiled: None where XLA itself ran out of memory; memory_gib is infinite then. num_recomputed:
    the instructions that XLA, besides what remat says, runs twice to come down to a limit of its
    own. compile_seconds: of all that was compiled to find this one.
    """

    plan: Plan
    compiled: jax.stages.Compiled | None
    memory_gib: float
    state_gib: float
    num_recomputed: int
    compile_seconds: float = math.nan

    def __call__(self, state, batch, **limits):
        """`step.update.update` of this plan; the state is donated."""
        assert self.compiled is not None
        return self.compiled(state, batch, **limits)

    def facts(self) -> dict[str, float]:
        """What goes on record."""
        return {
            "compile_seconds": self.compile_seconds,
            "predicted_memory_gib": self.memory_gib,
        }


def compile_to_fit(
    update: Callable,
    plan: Plan,
    *,
    pool_gib: float | None = None,
    compiler_options: dict | None = None,
) -> CompiledUpdate:
    """The update (`step.update.update`) of a plan, with remat chosen if it is `auto`.

    At most six compilations, one where the choice is kept from before. pool_gib: what JAX has on
    each device; asked of the devices unless given. Every process calls it, and all choose alike.
    Raises ValueError if it does not fit, which takes up to a dozen more compilations.
    """
    began = time.perf_counter()
    pool_gib = pool_gib or pool_of(plan)
    usable_gib = USABLE * pool_gib
    compile = functools.partial(compile_update, update, compiler_options=compiler_options)
    if plan.config.remat == Remat.AUTO:
        compiled = _choose(plan, compile, pool_gib=pool_gib)
    else:
        compiled = compile(plan)
    if compiled.memory_gib > usable_gib:
        raise ValueError(refusal.of(compiled, compile, pool_gib=pool_gib, usable_gib=usable_gib))
    _tell(compiled, pool_gib)
    return dataclasses.replace(compiled, compile_seconds=time.perf_counter() - began)


def _tell(compiled: CompiledUpdate, pool_gib: float) -> None:
    execution, asked = compiled.plan.execution, compiled.plan.config.remat
    remat, leaner = execution.remat.value, execution.remat.leaner
    chosen = f"auto chose {remat!r}" if asked == Remat.AUTO else repr(remat)
    if execution.leaner_layers and leaner:
        chosen += f", and {leaner.value!r} for the first {execution.leaner_layers} layers"
    if math.isfinite(pool_gib):
        log.info("remat: %s: %.1f of %.1f GiB predicted", chosen, compiled.memory_gib, pool_gib)
    elif asked == Remat.AUTO:
        log.info("remat: %s: these devices do not say how much memory they have", chosen)
    if compiled.num_recomputed:
        log.warning(
            "XLA runs %d instructions twice to take less memory, more than config.remat says; a "
            "leaner config.remat, config.scan_unroll=1 or fewer rows may be faster",
            compiled.num_recomputed,
        )


# One update.


def compile_update(
    update: Callable, plan: Plan, *, compiler_options: dict | None = None
) -> CompiledUpdate:
    """Compiles before there is a state or a batch, whether it fits or not.

    compiler_options: besides the plan's own. Raises what XLA raises but for a lack of memory.
    """
    try:
        compiled = compile_only(update, plan, compiler_options=compiler_options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        compiled = None
    memory, state, recomputed = math.inf, 0.0, 0.0
    if compiled is not None:
        memory = predicted_memory_gib(compiled)
        state = _analysis(compiled).argument_size_in_bytes / 2**30
        recomputed = float(len(RECOMPUTED.findall(compiled.as_text() or "")))
    # What processes decide by these, they decide alike: where they do not compile the same programs
    # in the same order, XLA's shared autotuning waits forever.
    memory, state, recomputed = distributed.largest([memory, state, recomputed])
    return CompiledUpdate(plan, compiled, memory, state, int(recomputed))


def compile_only(
    update: Callable, plan: Plan, *, compiler_options: dict | None = None
) -> jax.stages.Compiled:
    """As XLA gives it back."""
    with shd.use(plan.mesh, plan.rules):
        lowered = jit_update(update, plan).lower(
            plan.state, abstract_batch(plan), **abstract_limits(plan)
        )
        return lowered.compile(compiler_options=compiler_options)


def jit_update(update: Callable, plan: Plan) -> jax.stages.Wrapped:
    """`update` of this plan under `jax.jit`, as a run compiles it; it donates the state."""
    return jax.jit(
        functools.partial(update, plan=plan),
        donate_argnums=0,
        out_shardings=(jax.tree.map(lambda leaf: leaf.sharding, plan.state), None),
        compiler_options=plan.compiler_options,
    )


def predicted_memory_gib(compiled: jax.stages.Compiled) -> float:
    """State, batch and temporaries on the fullest device, GiB; the donated state counts once.

    Not in it, and not in JAX's pool: NCCL, cuDNN and the CUDA context (3 to 5 GiB on H100).
    """
    analysis = _analysis(compiled)
    new_outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    num_bytes = analysis.argument_size_in_bytes + new_outputs + analysis.temp_size_in_bytes
    return num_bytes / 2**30


def _analysis(compiled: jax.stages.Compiled) -> Any:
    analysis = compiled.memory_analysis()
    assert analysis is not None, "XLA analyses the memory of CPUs and GPUs"
    return analysis


def pool_of(plan: Plan) -> float:
    """GiB that JAX may take on each of the plan's devices; infinite if they do not say.

    CPU devices share what the machine has, or the cgroup of this process.
    """
    devices = plan.mesh.local_devices
    if devices[0].platform == "cpu":
        return -distributed.largest([-host_memory_gib() / len(devices)])[0]
    stats = [device.memory_stats() or {} for device in devices]
    pools = [s["bytes_limit"] / 2**30 if s.get("bytes_limit") else math.inf for s in stats]
    return -distributed.largest([-min(pools)])[0]


# remat="auto".


def _choose(plan: Plan, compile: Callable, *, pool_gib: float) -> CompiledUpdate:
    """The choice kept from before if it holds, else a new one, which is kept."""
    usable_gib = USABLE * pool_gib
    if kept := choice.read(plan, POLICIES, pool_gib=pool_gib):
        compiled = compile(with_remat(plan, kept.remat, leaner_layers=kept.leaner_layers))
        if compiled.memory_gib <= usable_gib and kept.holds(compiled.memory_gib):
            return compiled
    compiled = _richest(plan, compile, usable_gib=usable_gib)
    if compiled.memory_gib <= usable_gib < math.inf:
        choice.keep(compiled.plan, memory_gib=compiled.memory_gib, pool_gib=pool_gib)
    return compiled


def _richest(plan: Plan, compile: Callable, *, usable_gib: float) -> CompiledUpdate:
    """The richest policy that fits, or the leanest there is.

    Where XLA recomputes on its own, one that fits without if there is one. The richest is tried
    first, the others by bisection: two or three more compilations, and no estimate that could be
    wrong.
    """

    def fits(compiled: CompiledUpdate) -> bool:
        return compiled.memory_gib <= usable_gib

    def fits_well(compiled: CompiledUpdate) -> bool:
        return fits(compiled) and compiled.num_recomputed == 0

    richest = with_remat(plan, POLICIES[0])
    tried = {POLICIES[0]: compile(richest)}
    policies = () if fits_well(tried[POLICIES[0]]) else refusal.leaner(richest)
    while policies:
        middle = len(policies) // 2
        remat = policies[middle]
        tried[remat] = compile(with_remat(plan, remat))
        policies = policies[:middle] if fits_well(tried[remat]) else policies[middle + 1 :]
    by_richness = [tried[remat] for remat in POLICIES if remat in tried]
    best_effort = next(filter(fits, by_richness), by_richness[-1])
    best = next(filter(fits_well, by_richness), best_effort)
    for richer in by_richness:
        if richer.plan.execution.remat.leaner == best.plan.execution.remat and fits_well(best):
            for partly in _with_leaner_layers(richer, best, usable_gib=usable_gib):
                if fits_well(compiled := compile(partly)):
                    return compiled
    return best


def _with_leaner_layers(
    richer: CompiledUpdate, leaner: CompiledUpdate, *, usable_gib: float
) -> Iterator[Plan]:
    """Two to try between what does not fit and what does: every layer takes as much as another."""
    plan, excess_gib = richer.plan, richer.memory_gib - usable_gib
    num_layers = plan.config.model.num_layers
    is_loop = plan.config.scan_unroll < num_layers or plan.mesh.shape["stage"] > 1
    of_layer_gib = (richer.memory_gib - leaner.memory_gib) / num_layers
    if is_loop or not 0 < excess_gib < math.inf or of_layer_gib <= 0:
        return
    # One more than by arithmetic, and a sixteenth of all if that was not enough.
    num = math.ceil(excess_gib / of_layer_gib) + 1
    for leaner_layers in (num, num + max(1, num_layers // 16)):
        if leaner_layers < num_layers:
            yield with_remat(plan, plan.execution.remat, leaner_layers=leaner_layers)


def with_remat(plan: Plan, remat: Remat, *, leaner_layers: int = 0) -> Plan:
    """The plan with this policy in the place of `auto`.

    The config stays as it is: it is what the user asked for, and what a checkpoint remembers.
    """
    execution = dataclasses.replace(plan.execution, remat=remat, leaner_layers=leaner_layers)
    return dataclasses.replace(plan, execution=execution)
