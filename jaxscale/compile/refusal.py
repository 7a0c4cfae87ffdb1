"""What a run is told whose update does not fit the memory: what it needs, and settings that fit."""

import copy
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

from jaxscale import config as run_config
from jaxscale.config import Config, Remat, num_weight_shards
from jaxscale.step.plan import Plan, plan_of_run

log = logging.getLogger(__name__)

# What a refusal names, and the compilations it may take: 10 to 20 s each for 8B on a GPU's host.
SETTINGS, TRIES = 3, 12
# From most memory to least.
POLICIES = (
    Remat.NONE,
    Remat.GEMMS,
    Remat.GEMMS_LEAN,
    Remat.ATTENTION_MLP,
    Remat.ATTENTION,
    Remat.FULL,
)
LEANEST = {"remat": Remat.FULL.value, "scan_unroll": 1}


def of(compiled, compile: Callable, *, pool_gib: float, usable_gib: float) -> str:
    """The message; compiled: the CompiledUpdate that does not fit, compile: makes one of a plan."""
    plan = compiled.plan
    settings = _settings_that_fit(compiled, compile, usable_gib=usable_gib)
    chosen = plan.execution.remat
    remat = "" if plan.config.remat == chosen else f" with {chosen.value!r}"
    need = f"{compiled.memory_gib:.1f} GiB"
    if not math.isfinite(compiled.memory_gib):
        need = "more memory than XLA had to compile it"
    few = (
        f"; more devices take a part of the state each, of which {compiled.state_gib:.1f} GiB is "
        f"on each of {plan.mesh.size} now"
    )
    return (
        f"config.remat={plan.config.remat.value!r} cannot fit: the step{remat} needs {need} on "
        f"each device, and of the {pool_gib:.1f} GiB that JAX has on "
        f"{plan.mesh.devices.flat[0].device_kind} it can use {usable_gib:.1f} "
        f"({usable_gib / pool_gib:.0%}). "
        + (
            f"These fit: {', '.join(settings)}"
            if settings
            else "No other setting that was tried fits"
        )
        + (few if len(settings) < SETTINGS else "")
    )


def _settings_that_fit(compiled, compile: Callable, *, usable_gib: float) -> list[str]:
    """As flags with their GiB, one of each kind; all of them have been compiled."""
    log.warning("the step does not fit the memory; looking for settings that do")
    found: dict[tuple[str, ...], str] = {}
    tried: list[dict[str, Any]] = []
    for changes in _candidates(compiled.plan):
        if len(found) == SETTINGS or len(tried) == TRIES:
            break
        is_new = tuple(changes) not in found and changes not in tried
        plan = _changed(compiled.plan, changes) if is_new else None
        if plan is None or _at_least(compiled, plan) > usable_gib:
            continue
        tried.append(changes)
        memory_gib = compile(plan).memory_gib
        if memory_gib <= usable_gib:
            flags = " and ".join(f"config.{key}={value!r}" for key, value in changes.items())
            found[tuple(changes)] = f"{flags} ({memory_gib:.1f} GiB)"
    return list(found.values())


def leaner(plan: Plan) -> tuple[Remat, ...]:
    """The policies under the plan's, richest first, that make another program of it."""
    policies = POLICIES[POLICIES.index(plan.execution.remat) + 1 :]
    is_loop = plan.config.scan_unroll == 1 or plan.mesh.shape["stage"] > 1
    # In a loop `gemms` is lean already.
    return tuple(remat for remat in policies if remat != Remat.GEMMS_LEAN or not is_loop)


def _candidates(plan: Plan) -> Iterator[dict[str, Any]]:
    """Changes of the config: first of one thing, mild before strong.

    What leaves the training as it is comes before what does not.
    """
    config, sizes = plan.config, plan.mesh.shape
    layers = config.model.num_layers
    if config.remat.leaner and config.scan_unroll == layers > 3 and sizes["stage"] == 1:
        yield {"leaner_layers": config.leaner_layers + layers // 4}
    yield from ({"remat": remat.value} for remat in leaner(plan))
    if config.scan_unroll > 1:
        yield {"scan_unroll": 1}
    if config.mesh.zero < 3 and num_weight_shards(sizes) > 1:
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
    factors = (2, 4, 8, 16)
    yield from ({"grad_accumulation": config.grad_accumulation * by} for by in factors)
    yield from ({"batch_size": config.batch_size // by} for by in factors)
    yield from ({"seq_len": config.seq_len // by} for by in factors)


def _changed(plan: Plan, changes: dict[str, Any]) -> Plan | None:
    """The same run with these settings; None if that is no run. `auto` becomes the leanest."""
    config = copy.deepcopy(plan.config)
    for key, value in changes.items():
        *path, name = key.split(".")
        setattr(run_config.get(config, path[0]) if path else config, name, value)
    if config.remat == Remat.AUTO:
        config.remat = POLICIES[-1]
    try:
        return plan_of_run(config, devices=list(plan.mesh.devices.flat))
    except ValueError:
        return None


def _at_least(compiled, plan: Plan) -> float:
    """GiB that a changed plan needs in any case: what it is not worth a compilation to find out."""
    old, new = compiled.plan.config, plan.config
    if new.mesh != old.mesh:
        return 0.0
    is_leaner = (plan.execution.remat, new.leaner_layers, new.scan_unroll) != (
        compiled.plan.execution.remat,
        old.leaner_layers,
        old.scan_unroll,
    )
    if is_leaner or not math.isfinite(compiled.memory_gib):
        return compiled.state_gib
    share = _activations(new) / _activations(old)
    return compiled.state_gib + share * (compiled.memory_gib - compiled.state_gib)


def _activations(config: Config) -> float:
    """What they grow with at most: plain attention holds scores of the sequence's square."""
    return config.batch_size / config.grad_accumulation * config.seq_len**2
