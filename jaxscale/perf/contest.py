"""Variants of one training update timed against each other, by turns on one state.

Steps on H100 and H200 sit at the limit of the card's power: their time drifts with its temperature,
and from one machine to the next, by more than many a gain. So every round times every variant, in
rotated order and on the same batches, and what counts is the median over the rounds of the ratio to
the first variant within a round. The variants share one state, so none may change its arrays, mesh
or shardings, nor the batch.
"""

import contextlib
import dataclasses
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxscale.command_line import read_config
from jaxscale.compile import fit
from jaxscale.config import Config, ProfileConfig, Remat
from jaxscale.data.batch import Batch
from jaxscale.data.loader import Corpus
from jaxscale.perf.processes import FailedError
from jaxscale.perf.provenance import provenance
from jaxscale.perf.records import RATE, Record
from jaxscale.perf.variants import Variant, config_of
from jaxscale.step import delayed
from jaxscale.step.feed import device_batches
from jaxscale.step.plan import Plan, corpus_of_run, plan_of_run
from jaxscale.step.state import init_state
from jaxscale.step.update import update
from jaxscale.train.profile import STEP, Profile
from jaxscale.xla.cache import enable_compilation_cache
from jaxscale.xla.options import compiler_options

log = logging.getLogger(__name__)

PROFILED_STEPS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """num_steps: that count in each round, after one that does not.

    profiled: names of variants to record more steps of, in workdir/NAME. commit: to put on record
    where there is no git.
    """

    rounds: int
    num_steps: int
    profiled: Sequence[str] = ()
    workdir: str | None = None
    commit: str = ""


@dataclasses.dataclass(frozen=True)
class Common:
    """What all variants have in common; config: the one that `words` of a command line say."""

    words: list[str]
    config: Config
    corpus: Corpus
    devices: Sequence[jax.Device]


class LeftOut(dict[str, str]):
    """Names of variants that do not run, with the reason."""

    def add(self, name: str, reason: str) -> None:
        self[name] = reason
        log.info("%s is left out: %s", name, reason)


def hold(
    variants: list[Variant],
    words: list[str],
    *,
    options: Options,
    devices: Sequence[jax.Device] | None = None,
) -> Record:
    """The record of the contest. words: of a command line, which name the config.

    devices: all there are unless given. Raises ValueError for a user's mistake, before anything is
    compiled, and processes.FailedError where no variant runs to the end.
    """
    _check_profiled(variants, options)
    config = read_config(words)
    corpus = corpus_of_run(config)
    enable_compilation_cache()
    common = Common(words, config, corpus, devices or jax.devices())
    left_out = LeftOut()
    plans = make_plans(variants, common, left_out=left_out)
    timed = _measure(plans, common, options=options, left_out=left_out)
    return _make_record(timed, common, options=options, left_out=left_out)


def _check_profiled(variants: list[Variant], options: Options) -> None:
    names = [variant.name for variant in variants]
    if unknown := [name for name in options.profiled if name not in names]:
        raise ValueError(f"--profile: {unknown[0]!r} is not one of {', '.join(names)}")
    if options.profiled and not options.workdir:
        raise ValueError("--profile writes to a folder: name one, --workdir=DIR")


# The run as `train` makes it: its data, plan and compiled update.


def _plan_of(config: Config, common: Common) -> Plan:
    return plan_of_run(config, corpus=common.corpus, devices=common.devices)


def compile_one(plan: Plan) -> fit.CompiledUpdate:
    """No settings that fit are looked for, which takes minutes, unless remat="auto" asks for it."""
    if plan.config.remat == Remat.AUTO:
        return fit.compile_to_fit(update, plan)
    began = time.perf_counter()
    compiled = fit.compile_update(update, plan)
    return dataclasses.replace(compiled, compile_seconds=time.perf_counter() - began)


def _excess(update: fit.CompiledUpdate) -> str | None:
    """What to say of an update that needs more memory than there is."""
    usable_gib = fit.USABLE * fit.pool_of(update.plan)
    if update.compiled is not None and update.memory_gib <= usable_gib:
        return None
    return f"it needs {update.memory_gib:.1f} GiB, and {usable_gib:.1f} can be used"


def have_one_state(plan: Plan, first: Plan) -> bool:
    """Whether the two can go on from the same state; each has largest values of its own."""
    here, there = (each.state._replace(amax=()) for each in (plan, first))
    return jax.tree.flatten(here) == jax.tree.flatten(there)


# Before anything is measured.


def make_plans(
    variants: list[Variant], common: Common, *, left_out: LeftOut
) -> list[tuple[Variant, Plan]]:
    """Raises ValueError for a variant that cannot be; a pair that cannot be is left out."""
    plans: list[tuple[Variant, Plan]] = []
    for variant in variants:
        if left_out.keys() & set(variant.pair):
            continue  # the pair with an option without effect would equal the other one
        try:
            config = config_of(variant, words=common.words, common=common.config)
            if useless := _first_without_effect(variant, config, devices=common.devices):
                left_out.add(variant.name, f"{useless} has no effect here")
                continue
            plan = _plan_of(config, common)
            _check_same_state(plan, plans[0][1] if plans else plan)
        except ValueError as error:
            if not variant.pair:
                raise ValueError(f"{variant}: {error}") from None
            left_out.add(variant.name, str(error))
        else:
            plans.append((variant, plan))
    return plans


def _first_without_effect(
    variant: Variant, config: Config, *, devices: Sequence[jax.Device]
) -> str | None:
    """A compiler option that this jaxlib has not, or that is for another platform; the log says."""
    sizes, device = config.mesh.sizes(len(devices)), devices[0]

    def with_options(*texts: str) -> dict[str, Any]:
        return compiler_options(
            dataclasses.replace(config, xla_options=texts),
            sizes,
            platform=device.platform,
            device_kind=device.device_kind,
        )

    options = variant.compiler_options
    return next((each for each in options if with_options(each) == with_options()), None)


def _check_same_state(plan: Plan, first: Plan) -> None:
    if not have_one_state(plan, first):
        raise ValueError(
            "the state would have other arrays, another mesh or other shardings than with the "
            "first variant, and all variants share one; set it with --config, and compare two runs "
            "of scripts/bench_step.py"
        )


# Compiling and timing.


@dataclasses.dataclass
class Timed:
    """A variant that runs. round_seconds: of a step, for each round; loss: of the last step."""

    variant: Variant
    update: fit.CompiledUpdate
    round_seconds: list[float] = dataclasses.field(default_factory=list)
    loss: float = math.nan

    def num_microbatches(self) -> int:
        return self.update.plan.config.grad_accumulation


def _measure(
    plans: list[tuple[Variant, Plan]], common: Common, *, options: Options, left_out: LeftOut
) -> dict[str, Timed]:
    """By name, those that were timed to the end."""
    # They compile before there is a state: XLA's autotuning then has the memory for itself.
    timed = compile_all(plans, left_out)
    if not timed:
        raise FailedError("no variant is left")
    contest = Contest(timed, left_out)
    with open_loaders(timed, common.corpus) as next_batches:
        contest.warm_up(next_batches(1))
        for number in range(options.rounds):
            contest.time_round(next_batches(1 + options.num_steps), number=number)
            log.info("round %d of %d, ms: %s", number + 1, options.rounds, contest.last_round())
        timed = dict(contest.running)
        for name in options.profiled:
            folder = Path(str(options.workdir)) / name
            contest.record_profile(name, folder, batches=next_batches(1 + PROFILED_STEPS))
    if not timed:
        raise FailedError("no variant is left")
    return timed


def compile_all(plans: list[tuple[Variant, Plan]], left_out: LeftOut) -> dict[str, Timed]:
    timed: dict[str, Timed] = {}
    for variant, plan in plans:
        try:
            update = compile_one(plan)
        except Exception as error:  # XLA may refuse an option, a kernel the device
            left_out.add(variant.name, f"it does not compile: {_first_line(error)}")
            continue
        if excess := _excess(update):
            left_out.add(variant.name, excess)
            continue
        seconds, memory_gib = update.compile_seconds, update.memory_gib
        log.info("%s: compiled in %.1f s, %.1f GiB", variant.name, seconds, memory_gib)
        timed[variant.name] = Timed(variant, update)
    return timed


# By the number of microbatches: the same rows, cut differently.
Batches = dict[int, list[Batch]]


@contextlib.contextmanager
def open_loaders(timed: dict[str, Timed], corpus: Corpus) -> Iterator[Callable[[int], Batches]]:
    """Yields a function: so many further batches, on the devices."""
    plans = {each.num_microbatches(): each.update.plan for each in timed.values()}
    with contextlib.ExitStack() as stack:
        loaders = {
            num_microbatches: stack.enter_context(
                contextlib.closing(device_batches(plan, corpus.train, start=0))
            )
            for num_microbatches, plan in plans.items()
        }

        def next_batches(count: int) -> Batches:
            return jax.block_until_ready(
                {key: [next(loader) for _ in range(count)] for key, loader in loaders.items()}
            )

        yield next_batches


class Contest:
    """The variants that still run, and the one state that their updates go on from."""

    def __init__(self, timed: dict[str, Timed], left_out: LeftOut):
        self.running = dict(timed)
        self._left_out = left_out
        self._plan = next(iter(timed.values())).update.plan
        self._state: Any = init_state(self._plan)
        # Each variant has its own, () where scales are not delayed.
        plans = {name: each.update.plan for name, each in timed.items()}
        self._amax = {name: delayed.begin(plan.state.amax) for name, plan in plans.items()}

    def warm_up(self, batches: Batches) -> None:
        """A first execution of each sets up communication and CUDA graphs."""
        for name, timed in dict(self.running).items():
            self.run(name, batches[timed.num_microbatches()])

    def time_round(self, batches: Batches, *, number: int) -> None:
        names = list(self.running)
        first = number % max(len(names), 1)
        for name in (*names[first:], *names[:first]):
            timed = self.running[name]
            unmeasured, *measured = batches[timed.num_microbatches()]
            # The variant before leaves things in caches and queues: they are gone after one step.
            self.run(name, [unmeasured])
            if (seconds := self.run(name, measured)) is not None:
                timed.round_seconds.append(seconds)

    def last_round(self) -> str:
        """Milliseconds of a step, for people."""
        return ", ".join(
            f"{name} {timed.round_seconds[-1] * 1e3:.1f}" for name, timed in self.running.items()
        )

    def record_profile(self, name: str, folder: Path, *, batches: Batches) -> None:
        if name not in self.running:  # said when it was left out
            return
        unrecorded, *recorded = batches[self.running[name].num_microbatches()]
        self.run(name, [unrecorded])
        profile = Profile(ProfileConfig(steps=len(recorded)), folder, first_step=0)
        profile.start()
        try:
            self.run(name, recorded)
        finally:
            profile.stop()
        log.info("the profile of %s is in %s", name, folder)

    def run(self, name: str, batches: list[Batch]) -> float | None:
        """Seconds of a step; None if it raises, or its loss is not finite.

        From then on the variant runs no more.
        """
        if name not in self.running:
            return None
        try:
            return self._run(self.running[name], batches)
        except Exception as error:  # whatever it is, the others can go on
            del self.running[name]
            self._left_out.add(name, f"it fails: {_first_line(error)}")
            # The state is donated: an update that fails may have taken it along.
            if isinstance(error, FloatingPointError) or not _is_alive(self._state):
                self._state = None  # its memory first
                self._state = init_state(self._plan)
            return None

    def _run(self, timed: Timed, batches: list[Batch]) -> float:
        name = timed.variant.name
        self._state = self._state._replace(amax=self._amax[name])
        began = time.perf_counter()
        for number, batch in enumerate(batches, 1):
            with jax.profiler.StepTraceAnnotation(STEP, step_num=number):
                self._state, metrics = timed.update(self._state, batch)
        jax.block_until_ready((self._state, metrics))
        seconds = (time.perf_counter() - began) / len(batches)
        self._amax[name] = self._state.amax
        timed.loss = float(metrics["loss"])
        # NaNs are refused at once: sums over them take less power than real ones, and all that
        # follow on this state would have them.
        if not math.isfinite(timed.loss + float(metrics["grad_norm"])):
            raise FloatingPointError(
                f"the loss is {timed.loss}, the gradient norm {metrics['grad_norm']}"
            )
        return seconds


def _is_alive(state: Any) -> bool:
    try:
        jax.block_until_ready(state)
    except RuntimeError:  # what an update that failed has left
        return False
    return not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


# What is told.


def _make_record(
    timed: dict[str, Timed], common: Common, *, options: Options, left_out: LeftOut
) -> Record:
    """The first variant that was timed to the end is what the others are compared with."""
    first = next(iter(timed.values()))
    return {
        "name": "step_variants",
        "settings": common.words,
        "device_kind": common.devices[0].device_kind,
        "num_devices": len(common.devices),
        "rounds": options.rounds,
        "steps": options.num_steps,
        "ratio_to": first.variant.name,
        "variants": {name: _figures(each, first) for name, each in timed.items()},
        "left_out": left_out,
        **provenance(commit=options.commit),
    }


def _figures(timed: Timed, first: Timed) -> Record:
    update, seconds = timed.update, statistics.median(timed.round_seconds)
    plan = update.plan
    ratios = [
        mine / its for mine, its in zip(timed.round_seconds, first.round_seconds, strict=True)
    ]
    return {
        "settings": timed.variant.settings,
        "step_seconds": seconds,
        RATE: plan.config.batch_size * plan.config.seq_len / seconds / plan.mesh.size,
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "round_step_seconds": timed.round_seconds,
        "remat": plan.execution.remat.value,
        "leaner_layers": plan.execution.leaner_layers,
        "num_recomputed": update.num_recomputed,
        "loss": timed.loss,
        "compile_seconds": update.compile_seconds,
        "predicted_memory_gib": update.memory_gib,
    }
