"""A pipeline's schedules timed beside FSDP, and how much of an update their bubbles take.

An update of M microbatches takes M times what one of them takes in a full pipeline, and once more
the bubble and the optimiser. So two numbers of microbatches give the time of one, a trace of an
update gives the optimiser's, and the rest is the bubble: measured, to hold against what the table
and the trace let expect. The two take turns, and each turn gives a bubble of its own: two H200 made
updates 1.6% faster within the minute of three of each, half of a bubble of 3%.

All updates compile first, side by side but for the first, whose autotuning the others then find
done. Schedules with the same arrays in the state share one. Rows are of the run's own data.
"""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from jaxscale.command_line import read_config
from jaxscale.data.loader import Corpus
from jaxscale.parallel.choice import bubble
from jaxscale.perf.anatomy import anatomy
from jaxscale.perf.contest import (
    Batches,
    Contest,
    LeftOut,
    Timed,
    compile_all,
    have_one_state,
    open_loaders,
)
from jaxscale.perf.contest_table import aligned, left_out_lines
from jaxscale.perf.processes import FailedError
from jaxscale.perf.provenance import provenance
from jaxscale.perf.records import RATE, Record
from jaxscale.perf.trace import read
from jaxscale.perf.variants import Variant
from jaxscale.step.plan import Plan, corpus_of_run, plan_of_run
from jaxscale.xla.cache import enable_compilation_cache

log = logging.getLogger(__name__)

FSDP = "fsdp"
# Of a microbatch, as FSDP's GPUs take as many rows each.
FSDP_ROWS_PER_DEVICE = 2
# Each with its settings. Those that name remat would not fit with `attention_mlp`: Llama 3 8B, rows
# of 8192, on two H200.
SCHEDULES = {
    FSDP: (),
    "interleaved_4": ("pipeline.schedule=interleaved", "pipeline.chunks=4"),
    "one_f_one_b": ("pipeline.schedule=one_f_one_b",),
    "zb_h1": ("pipeline.schedule=zb_h1", "remat=attention"),
    "gpipe": ("pipeline.schedule=gpipe", "remat=full"),
    "lean": ("pipeline.schedule=one_f_one_b", "pipeline.lean=True"),
    "interleaved_2": (
        "pipeline.schedule=interleaved",
        "pipeline.chunks=2",
        "remat=attention",
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """schedules: names of SCHEDULES. num_steps: that count.

    profiled: of the schedules, those of which an update of the fewest microbatches is recorded, in
    workdir/NAME. ends: of time.monotonic(); what has not begun by then is left out.
    """

    schedules: Sequence[str]
    microbatches: Sequence[int]
    num_steps: int
    profiled: Sequence[str]
    workdir: str | None
    ends: float
    commit: str = ""


def measure(
    words: list[str], options: Options, *, devices: Sequence[jax.Device] | None = None
) -> Record:
    """The record. words: of a command line, which name the config; a stage is one device.

    Raises ValueError for a user's mistake, before anything is compiled, and processes.FailedError
    where nothing runs to the end.
    """
    _check(options)
    devices = devices or jax.devices()
    corpus = corpus_of_run(read_config(words))
    enable_compilation_cache()
    plans = _plans(words, options, devices=devices, corpus=corpus)
    left_out = LeftOut()
    timed = _compile(plans, left_out)
    seconds: dict[str, list[float]] = {}
    profiles: dict[str, Record] = {}

    def record() -> Record:
        runs = {name: _figures(timed[name], each) for name, each in seconds.items()}
        return {
            "name": "pipeline",
            "settings": words,
            "device_kind": devices[0].device_kind,
            "num_devices": len(devices),
            "runs": _with_bubbles(runs, profiles),
            "profiles": profiles,
            "left_out": left_out,
            **provenance(commit=options.commit),
        }

    groups = _with_one_state(timed)
    for number, group in enumerate(groups, start=1):
        _time(group, corpus, options=options, left_out=left_out, seconds=seconds, found=profiles)
        if seconds and number < len(groups):
            log.info("so far:\n%s", table(record()))  # a caller may have a limit of time
    if not seconds:
        raise FailedError("no schedule is left")
    return record()


def _check(options: Options) -> None:
    for flag, names in (("schedules", options.schedules), ("profile", options.profiled)):
        if unknown := [name for name in names if name not in SCHEDULES]:
            raise ValueError(f"--{flag}={unknown[0]} is not one of {', '.join(SCHEDULES)}")
    if len({*options.microbatches}) < 2:
        raise ValueError(
            "--microbatches: name two numbers, such as 8,32; what a bubble takes follows from them"
        )
    if options.profiled and not options.workdir:
        raise ValueError("--profile writes to a folder: name one, --workdir=DIR")


def _plans(
    words: list[str], options: Options, *, devices: Sequence[jax.Device], corpus: Corpus
) -> list[tuple[Variant, Plan]]:
    """A schedule's side by side, few microbatches first."""
    found = []
    for name in options.schedules:
        for number in sorted({*options.microbatches}):
            variant = Variant(f"{name}_{number}", settings(name, number, num=len(devices)))
            added = [f"--config.{setting}" for setting in variant.settings]
            config = read_config([*words, *added])
            found.append((variant, plan_of_run(config, devices=devices, corpus=corpus)))
    return found


def settings(name: str, num_rows: int, *, num: int) -> tuple[str, ...]:
    """Of so many rows an update, on `num` devices."""
    rows = FSDP_ROWS_PER_DEVICE * num if name == FSDP else 1
    return (
        "mesh.stage=1" if name == FSDP else f"mesh.stage={num}",
        f"batch_size={num_rows}",
        f"grad_accumulation={max(1, num_rows // rows)}",
        *SCHEDULES[name],
    )


# Compiling.


def _compile(plans: list[tuple[Variant, Plan]], left_out: LeftOut) -> dict[str, Timed]:
    """By name, in the order of the plans."""
    began = time.monotonic()
    found = compile_all(plans[:1], left_out)
    with concurrent.futures.ThreadPoolExecutor(len(plans)) as pool:
        for timed in pool.map(lambda plan: compile_all([plan], left_out), plans[1:]):
            found |= timed
    log.info("all compiled in %.0f s", time.monotonic() - began)
    return found


def _with_one_state(timed: dict[str, Timed]) -> list[dict[str, Timed]]:
    groups: list[dict[str, Timed]] = []
    for name, each in timed.items():
        for group in groups:
            if have_one_state(each.update.plan, next(iter(group.values())).update.plan):
                group[name] = each
                break
        else:
            groups.append({name: each})
    return groups


# Timing.


def _time(
    group: dict[str, Timed],
    corpus: Corpus,
    *,
    options: Options,
    left_out: LeftOut,
    seconds: dict[str, list[float]],
    found: dict[str, Record],
) -> None:
    """Adds the seconds of each step, and what profiles say, by name."""
    if time.monotonic() > options.ends:
        for name in group:
            left_out.add(name, "no time is left")
        return
    contest = Contest(group, left_out)
    with open_loaders(group, corpus) as next_batches:
        batches = next_batches(1 + options.num_steps)
        for _, runs in itertools.groupby(group, key=_schedule_of):  # side by side: `_plans`
            names = list(runs)
            if time.monotonic() > options.ends:
                for name in names:
                    left_out.add(name, "no time is left")
                continue
            seconds |= _in_turns(contest, names, batches=batches)
        for schedule in options.profiled:
            name = f"{schedule}_{min(options.microbatches)}"
            if name in seconds and name in group and time.monotonic() < options.ends:
                folder = Path(str(options.workdir)) / schedule
                contest.record_profile(name, folder, batches=batches)
                with contextlib.suppress(ValueError):  # a trace of no GPU
                    found[schedule] = _profiled(folder)


def _schedule_of(name: str) -> str:
    return name.rpartition("_")[0]


def _in_turns(contest: Contest, names: list[str], *, batches: Batches) -> dict[str, list[float]]:
    """The seconds of each step that counts, by name; every other time in the opposite order.

    Unlike `Contest.time_round` without a step before each that does not count, which takes 12 s
    where 32 microbatches do.
    """
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(len(next(iter(batches.values())))):
        for name in reversed(names) if number % 2 else names:
            if name not in contest.running:
                continue
            batch = batches[contest.running[name].num_microbatches()][number]
            taken = contest.run(name, [batch])
            if number and taken is not None:  # the first sets up communication
                seconds[name].append(taken)
    whole = {name: times for name, times in seconds.items() if name in contest.running}
    for name, times in whole.items():
        log.info("%s: %s s", name, ", ".join(f"{each:.3f}" for each in times))
    return whole


def _profiled(folder: Path) -> Record:
    step = anatomy(read(folder))
    return {
        "step_seconds": step.step_seconds,
        "seconds": step.seconds,
        "hidden_communication_seconds": step.hidden_communication_seconds,
    }


# What is told.


def _figures(timed: Timed, seconds: list[float]) -> Record:
    plan = timed.update.plan
    middle = statistics.median(seconds)
    return {
        "settings": timed.variant.settings,
        "microbatches": plan.config.grad_accumulation,
        "remat": plan.execution.remat.value,
        "step_seconds": middle,
        "all_step_seconds": seconds,
        RATE: plan.config.batch_size * plan.config.seq_len / middle / plan.mesh.size,
        "loss": timed.loss,
        "bubble_of_the_table": bubble(plan.pipeline, plan.config) if plan.pipeline else None,
        "compile_seconds": timed.update.compile_seconds,
        "predicted_memory_gib": timed.update.memory_gib,
        "num_recomputed": timed.update.num_recomputed,
    }


def _with_bubbles(runs: dict[str, Record], profiles: Mapping[str, Record]) -> dict[str, Record]:
    """With `bubble` where a schedule has two runs, `bubble_expected` where it has a profile too."""
    found = {}
    for schedule in SCHEDULES:
        mine = {name: run for name, run in runs.items() if _schedule_of(name) == schedule}
        if schedule != FSDP and len(mine) > 1:
            mine = _with_bubble(mine, _profile_of(schedule, profiles))
            if schedule in profiles:
                mine = _with_expected(mine, profiles[schedule])
        found |= mine
    return found


def _profile_of(schedule: str, profiles: Mapping[str, Record]) -> Record | None:
    """Its own or another pipeline's: the optimiser of each works on parts of equal size."""
    others = (each for name, each in profiles.items() if name != FSDP)
    return profiles.get(schedule) or next(others, None)


def _with_bubble(runs: dict[str, Record], profile: Record | None) -> dict[str, Record]:
    """`bubble` is the median of what each turn says, `bubble_min` and `bubble_max` the spread.

    Without a profile the optimiser counts as no time. Of a lean schedule, which waits in each tick,
    most of the bubble is in what a microbatch takes.
    """
    optimizer = profile["seconds"]["optimizer"] if profile else 0.0
    few, *_, many = sorted(runs.values(), key=lambda run: run["microbatches"])
    microbatches, rests = [], []
    for short, long in zip(few["all_step_seconds"], many["all_step_seconds"], strict=True):
        microbatch = (long - short) / (many["microbatches"] - few["microbatches"])
        microbatches.append(microbatch)
        rests.append(short - few["microbatches"] * microbatch - optimizer)

    def told(run: Record) -> Record:
        return {
            "microbatch_seconds": statistics.median(microbatches),
            "optimizer_seconds": optimizer,
            "bubble": statistics.median(rests) / run["step_seconds"],
            "bubble_min": min(rests) / run["step_seconds"],
            "bubble_max": max(rests) / run["step_seconds"],
        }

    return {name: run | told(run) for name, run in runs.items()}


def _with_expected(runs: dict[str, Record], profile: Record) -> dict[str, Record]:
    """With the table's bubble of what its ops take of a microbatch: not the loss.

    That is made by all stages at once, a microbatch at a time, and no tick without one makes it.
    """
    seconds, fewest = profile["seconds"], min(run["microbatches"] for run in runs.values())
    loss = (seconds["loss"] + seconds["loss_gemm"]) / fewest

    def expected(run: Record) -> float:
        share = run["bubble_of_the_table"]
        busy = run["microbatches"] * (run["microbatch_seconds"] - loss)
        return busy * share / (1 - share) / run["step_seconds"]

    return {name: run | {"bubble_expected": expected(run)} for name, run in runs.items()}


def table(record: Record) -> str:
    """What a person reads."""
    head = (
        *("run", "seconds", "tokens/s/device", "bubble", "(min - max)", "expected"),
        *("of the table", "GiB", "compile s"),
    )
    rows = [head, *(_cells(name, each) for name, each in record["runs"].items())]
    lines = [f"{record['num_devices']} x {record['device_kind']}", *aligned(rows)]
    for name, profile in record["profiles"].items():
        parts = (f"{key} {1e3 * value:.1f}" for key, value in profile["seconds"].items())
        lines.append(f"{name}, ms of a recorded step: {', '.join(parts)}")
    return "\n".join([*lines, *left_out_lines(record)])


def _cells(name: str, each: Record) -> tuple[str, ...]:
    def share(key: str) -> str:
        return "" if each.get(key) is None else f"{each[key]:.1%}"

    return (
        name,
        f"{each['step_seconds']:.3f}",
        f"{each[RATE]:,.0f}",
        share("bubble"),
        f"({share('bubble_min')} - {share('bubble_max')})" if "bubble" in each else "",
        share("bubble_expected"),
        share("bubble_of_the_table"),
        f"{each['predicted_memory_gib']:.1f}",
        f"{each['compile_seconds']:.1f}",
    )
