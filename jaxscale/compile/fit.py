"""Whether a run's step fits the devices' memory: XLA compiles it and says, before the run takes any of that memory.

`config.remat="auto"` becomes the richest policy that fits. A step that cannot fit is refused with settings that would.
"""

import copy
import dataclasses
import functools
import hashlib
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxscale
from jaxscale import config as run_config
from jaxscale import distributed
from jaxscale import sharding as shd
from jaxscale.checkpoint import checksums
from jaxscale.config import Config, Remat
from jaxscale.data.batch import Batch
from jaxscale.step.state import Plan, abstract_state, make_plan
from jaxscale.step.update import BATCH_AXES, make_train_step

log = logging.getLogger(__name__)

# Richest first. Without `none`, which keeps the gathered weights of every layer.
POLICIES = (Remat.GEMMS, Remat.ATTENTION_MLP, Remat.ATTENTION, Remat.FULL)
# Of JAX's pool. XLA's figure is of this very program; the rest is for the next batch and for what fragmentation costs. The peaks
# of three runs on H100 were 0.1 GiB above figures that were made ahead, without autotuning, and one was 1.8 GiB (5%) above.
USABLE = 0.97
# A kept choice holds as long as its memory is within this of what it was: another XLA or another model code is chosen for anew.
KEPT_TOLERANCE = 0.01
# Instructions that XLA's rematerialisation has added, in the text of a program: `%fusion.12.remat2 = `. In the 8B step unrolled
# over 32 layers with `gemms` on 8 H100 they were 660: it brought 86.6 GiB down to 69.4, and 151 all-gathers that overlap with
# nothing are among them.
RECOMPUTED = re.compile(r"%[\w.-]+\.remat[\d.]* = ")
# What a refusal names, and the compilations that it may take: 10 to 20 s each for 8B on a GPU's host.
SETTINGS, TRIES = 3, 12
LEANEST = {"remat": Remat.FULL.value, "scan_unroll": 1}
# Parts of the config that do not change how much memory a step takes.
NO_MEMORY = (
    "steps",
    "seed",
    "schedule",
    "data",
    "checkpoint",
    "evaluation",
    "sample",
    "log",
    "profile",
)


@dataclasses.dataclass(frozen=True)
class Step:
    """A plan's step, compiled. GiB are of the fullest device and predicted, seconds those of all that was compiled for it.

    compiled: None where XLA itself ran out of memory; memory_gib is infinite then. num_recomputed: the instructions that XLA,
    besides what remat says, runs twice to come down to a limit of its own (about 80% of the card).
    """

    plan: Plan
    compiled: jax.stages.Compiled | None
    memory_gib: float
    state_gib: float
    num_recomputed: int
    compile_seconds: float = math.nan

    def __call__(self, state, batch):
        """One update, as `make_train_step` says."""
        assert self.compiled is not None
        return self.compiled(state, batch)

    def facts(self) -> dict[str, float]:
        """What goes on record."""
        return {"compile_seconds": self.compile_seconds, "predicted_memory_gib": self.memory_gib}


Compile = Callable[[Plan], Step]


def compile_to_fit(
    plan: Plan, *, pool_gib: float | None = None, compiler_options: dict | None = None
) -> Step:
    """The run's step, with remat chosen if it is `auto`: at most three compilations, one where the choice is kept from before.

    pool_gib: what JAX has on each device; asked of the devices unless given. Every process calls it, and all choose alike.
    Raises ValueError for a step that does not fit, which takes up to a dozen more compilations.
    """
    began = time.perf_counter()
    pool_gib = pool_gib or pool_of(plan)
    compile = functools.partial(compile_plan, compiler_options=compiler_options)
    step = _choose(plan, compile, pool_gib) if plan.config.remat == Remat.AUTO else compile(plan)
    if step.memory_gib > USABLE * pool_gib:
        raise ValueError(
            _refusal(step, pool_gib, _settings_that_fit(step, compile, USABLE * pool_gib))
        )
    _tell(step, pool_gib)
    return dataclasses.replace(step, compile_seconds=time.perf_counter() - began)


def _tell(step: Step, pool_gib: float) -> None:
    remat = step.plan.execution.remat.value
    chosen = f"auto chose {remat!r}" if step.plan.config.remat == Remat.AUTO else repr(remat)
    if math.isfinite(pool_gib):
        log.info("remat: %s: %.1f of %.1f GiB predicted", chosen, step.memory_gib, pool_gib)
    elif step.plan.config.remat == Remat.AUTO:
        log.info("remat: %s: these devices do not say how much memory they have", chosen)
    if step.num_recomputed:
        log.warning(
            "XLA runs %d instructions twice to take less memory, more than config.remat says; a leaner config.remat, "
            "config.scan_unroll=1 or fewer rows may be faster", step.num_recomputed,
        )  # fmt: skip


# One step.


def compile_plan(plan: Plan, *, compiler_options: dict | None = None) -> Step:
    """Raises what XLA raises but for a lack of memory."""
    try:
        compiled = compile_step(plan, compiler_options=compiler_options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        compiled = None
    memory, state, recomputed = math.inf, 0.0, 0.0
    if compiled is not None:
        memory, state = (
            predicted_memory_gib(compiled),
            _analysis(compiled).argument_size_in_bytes / 2**30,
        )
        recomputed = float(len(RECOMPUTED.findall(compiled.as_text() or "")))
    memory, state, recomputed = _agreed(plan.mesh, memory, state, recomputed)
    return Step(plan, compiled, memory, state, int(recomputed))


def compile_step(plan: Plan, *, compiler_options: dict | None = None) -> jax.stages.Compiled:
    """The step as `train` runs it, compiled before there is a state or a batch; compiler_options: besides the plan's own."""
    with shd.use(plan.mesh, plan.rules):
        lowered = make_train_step(plan).lower(abstract_state(plan), abstract_batch(plan))
        return lowered.compile(compiler_options=compiler_options)


def abstract_batch(plan: Plan) -> Batch:
    """Shapes, dtypes and shardings of a batch."""
    config = plan.config
    shape = (
        config.grad_accumulation,
        config.batch_size // config.grad_accumulation,
        config.seq_len,
    )
    array = jax.ShapeDtypeStruct(
        shape, jnp.int32, sharding=NamedSharding(plan.mesh, plan.rules.spec(BATCH_AXES))
    )
    return Batch(array, array, array, array)


def predicted_memory_gib(compiled: jax.stages.Compiled) -> float:
    """State, batch and temporaries on the fullest device, GiB; the donated state is counted once.

    Not in it, and not in JAX's pool: NCCL, cuDNN and the CUDA context (3 to 5 GiB on H100).
    """
    analysis = _analysis(compiled)
    new_outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return (analysis.argument_size_in_bytes + new_outputs + analysis.temp_size_in_bytes) / 2**30


def _analysis(compiled: jax.stages.Compiled) -> Any:
    analysis = compiled.memory_analysis()
    assert analysis is not None, "XLA analyses the memory of CPUs and GPUs"
    return analysis


def pool_of(plan: Plan) -> float:
    """GiB that JAX may take on each of the plan's devices; infinite if they do not say (CPU)."""
    stats = [device.memory_stats() or {} for device in plan.mesh.local_devices]
    pools = [s["bytes_limit"] / 2**30 if s.get("bytes_limit") else math.inf for s in stats]
    return -_agreed(plan.mesh, -min(pools))[0]


def _agreed(mesh: Mesh, *values: float) -> list[float]:
    """The largest of each value over all processes: what they decide by it, they decide alike.

    Where they do not compile the same programs in the same order, XLA's shared autotuning waits forever.
    """
    if jax.process_count() == 1:
        return list(values)
    mine = np.tile(np.array(values, np.float32), (mesh.size, 1))
    by_device = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    rows = jax.make_array_from_callback(mine.shape, by_device, lambda index: mine[index])
    largest = jax.jit(lambda x: x.max(0), out_shardings=NamedSharding(mesh, PartitionSpec()))(rows)
    return np.asarray(largest).tolist()


# remat="auto".


def _choose(plan: Plan, compile: Compile, pool_gib: float) -> Step:
    """The choice kept from before if it holds, else a new one, which is kept."""
    if kept := _read_choice(plan, pool_gib):
        step = compile(_with_remat(plan, kept[0]))
        if (
            step.memory_gib <= USABLE * pool_gib
            and abs(step.memory_gib / kept[1] - 1) <= KEPT_TOLERANCE
        ):
            return step
    step = _richest(plan, compile, USABLE * pool_gib)
    _keep_choice(plan, pool_gib, step)
    return step


def _richest(plan: Plan, compile: Compile, usable_gib: float) -> Step:
    """The richest policy that fits, or the leanest there is; where XLA recomputes on its own, one that fits without if there is.

    The richest first, the others by bisection: two more compilations, and no estimate that could be wrong.
    """

    def fits(step: Step) -> bool:
        return step.memory_gib <= usable_gib

    def fits_well(step: Step) -> bool:
        return fits(step) and step.num_recomputed == 0

    steps = {POLICIES[0]: compile(_with_remat(plan, POLICIES[0]))}
    policies = POLICIES[len(POLICIES) if fits_well(steps[POLICIES[0]]) else 1 :]
    while policies:
        middle = len(policies) // 2
        remat = policies[middle]
        steps[remat] = compile(_with_remat(plan, remat))
        policies = policies[:middle] if fits_well(steps[remat]) else policies[middle + 1 :]
    by_richness = [steps[remat] for remat in POLICIES if remat in steps]
    return next(filter(fits_well, by_richness), next(filter(fits, by_richness), by_richness[-1]))


def _with_remat(plan: Plan, remat: Remat) -> Plan:
    """The config stays as it is: it is what the user asked for, and what a checkpoint remembers."""
    return dataclasses.replace(plan, execution=dataclasses.replace(plan.execution, remat=remat))


def _read_choice(plan: Plan, pool_gib: float) -> tuple[Remat, float] | None:
    """The policy chosen before for the same step and devices, and its GiB; what the lead process has kept counts for all."""
    index, memory = -1.0, 0.0
    if math.isfinite(pool_gib) and distributed.is_lead():
        try:
            record = json.loads(_choice_path(plan, pool_gib).read_text())
            index, memory = (
                float(POLICIES.index(record["remat"])),
                float(record["predicted_memory_gib"]),
            )
        except (OSError, ValueError, KeyError, TypeError):  # none kept, or damaged: chosen anew
            pass
    index, memory = _agreed(plan.mesh, index, memory)
    return (POLICIES[int(index)], memory) if index >= 0 and memory > 0 else None


def _keep_choice(plan: Plan, pool_gib: float, step: Step) -> None:
    if not (step.memory_gib <= USABLE * pool_gib < math.inf and distributed.is_lead()):
        return
    record = {"remat": step.plan.execution.remat.value, "predicted_memory_gib": step.memory_gib}
    path = _choice_path(plan, pool_gib)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        checksums.write_atomically(
            path, checksums.to_json(record | {"key": _choice_key(plan, pool_gib)})
        )
    except OSError as error:
        log.warning(
            "the choice of remat is not kept for the next start: %s (%s)", path, error.strerror
        )


def _choice_path(plan: Plan, pool_gib: float) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(checksums.to_json(_choice_key(plan, pool_gib))).hexdigest()[:32]
    return cache / "jaxscale" / "remat" / f"{name}.json"


def _choice_key(plan: Plan, pool_gib: float) -> dict[str, Any]:
    """All that the step's memory depends on, but for the code, whose changes KEPT_TOLERANCE finds."""
    config = {
        key: value for key, value in run_config.to_json(plan.config).items() if key not in NO_MEMORY
    }
    return {
        "config": config,
        "max_documents_per_row": plan.config.data.max_documents_per_row,
        "compiler_options": plan.compiler_options,
        "mesh": dict(plan.mesh.shape),
        "device_kind": plan.mesh.devices.flat[0].device_kind,
        "pool_gib": pool_gib,
        "jax": jax.__version__,
        "jaxscale": jaxscale.__version__,
    }


# A step that does not fit.


def _refusal(step: Step, pool_gib: float, settings: list[str]) -> str:
    plan = step.plan
    remat = (
        "" if plan.config.remat == plan.execution.remat else f" with {plan.execution.remat.value!r}"
    )
    need = (
        f"{step.memory_gib:.1f} GiB"
        if math.isfinite(step.memory_gib)
        else "more memory than XLA had to compile it"
    )
    few = f"; more devices take a part of the state each, of which {step.state_gib:.1f} GiB is on each of {plan.mesh.size} now"
    return (
        f"config.remat={plan.config.remat.value!r} cannot fit: the step{remat} needs {need} on each device, and of the "
        f"{pool_gib:.1f} GiB that JAX has on {plan.mesh.devices.flat[0].device_kind} it can use "
        f"{USABLE * pool_gib:.1f} ({USABLE:.0%}). "
        + (
            f"These fit: {', '.join(settings)}"
            if settings
            else "No other setting that was tried fits"
        )
        + (few if len(settings) < SETTINGS else "")
    )


def _settings_that_fit(step: Step, compile: Compile, usable_gib: float) -> list[str]:
    """As flags with their GiB, one of each kind; all of them have been compiled."""
    log.warning("the step does not fit the memory; looking for settings that do")
    found: dict[tuple[str, ...], str] = {}
    tried: list[dict[str, Any]] = []
    for changes in _candidates(step.plan):
        if len(found) == SETTINGS or len(tried) == TRIES:
            break
        plan = None if tuple(changes) in found or changes in tried else _changed(step.plan, changes)
        if plan is None or _at_least(step, plan) > usable_gib:
            continue
        tried.append(changes)
        memory_gib = compile(plan).memory_gib
        if memory_gib <= usable_gib:
            flags = " and ".join(f"config.{key}={value!r}" for key, value in changes.items())
            found[tuple(changes)] = f"{flags} ({memory_gib:.1f} GiB)"
    return list(found.values())


def _candidates(plan: Plan) -> Iterator[dict[str, Any]]:
    """Changes of the config: first of one thing, what leaves the training as it is before what does not; mild before strong."""
    config, sizes = plan.config, plan.mesh.shape
    policies = (Remat.NONE, *POLICIES)
    yield from (
        {"remat": remat.value} for remat in policies[policies.index(plan.execution.remat) + 1 :]
    )
    if config.scan_unroll > 1:
        yield {"scan_unroll": 1}
    if config.mesh.zero < 3 and sizes["fsdp"] > 1:
        yield {"mesh.zero": 3}
    if not config.mesh.reshard_after_forward:
        yield {"mesh.reshard_after_forward": True}
    if sizes["data"] > 1:
        yield {"mesh.data": 1, "mesh.fsdp": sizes["data"] * sizes["fsdp"]}
    yield from _fewer_tokens(config)
    leanest = {
        key: value
        for key, value in LEANEST.items()
        if run_config.get(config, key) not in (value, Remat.AUTO)
    }
    if leanest:
        yield leanest
        yield from (leanest | changes for changes in _fewer_tokens(config))


def _fewer_tokens(config: Config) -> Iterator[dict[str, Any]]:
    """In a microbatch."""
    yield from (
        {"grad_accumulation": config.grad_accumulation * factor} for factor in (2, 4, 8, 16)
    )
    yield from ({"batch_size": config.batch_size // factor} for factor in (2, 4, 8, 16))
    yield from ({"seq_len": config.seq_len // factor} for factor in (2, 4, 8, 16))


def _changed(plan: Plan, changes: dict[str, Any]) -> Plan | None:
    """The same run with these settings; None if that is no run. Where remat is `auto` it is the leanest."""
    config = copy.deepcopy(plan.config)
    for key, value in changes.items():
        *path, name = key.split(".")
        setattr(run_config.get(config, path[0]) if path else config, name, value)
    try:
        run_config.validate(config)
        sizes = run_config.validate_on(config, plan.mesh.size)
    except ValueError:
        return None
    changed = make_plan(config, sizes, devices=list(plan.mesh.devices.flat))
    return _with_remat(changed, POLICIES[-1]) if config.remat == Remat.AUTO else changed


def _at_least(step: Step, plan: Plan) -> float:
    """GiB that a changed plan needs in any case: what it is not worth a compilation to find out."""
    old, new = step.plan.config, plan.config
    if new.mesh != old.mesh:
        return 0.0
    if (new.remat, new.scan_unroll) != (old.remat, old.scan_unroll) or not math.isfinite(
        step.memory_gib
    ):
        return step.state_gib
    share = _activations(new) / _activations(old)
    return step.state_gib + share * (step.memory_gib - step.state_gib)


def _activations(config: Config) -> float:
    """What they grow with at most: plain attention holds scores of the sequence's square."""
    return config.batch_size / config.grad_accumulation * config.seq_len**2
