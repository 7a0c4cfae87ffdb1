"""A run that is saved by so many processes of this machine and goes on with another number of them.

Each start is killed, all processes at once, as soon as its save is in place. What the next one then
makes of it is compared with a run that stayed as it began.
"""

import dataclasses
import functools
import re
import signal
import statistics
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxscale.perf.local_runs import command, difference, losses, resumed
from jaxscale.perf.processes import FailedError, run
from jaxscale.perf.records import read_records, steps_of

# "saved step 125: 96.363 GB, written in 42.9 s, checked and in place after 72.2 s"
SAVED = r"saved step {step}.*?: ([\d.]+) GB, written in ([\d.]+) s, .* in place after ([\d.]+) s"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """nums: processes of each start. settings: of scripts/train.py, `--config=FILE` first.

    every: steps from one save to the next. timeout_seconds: of each start.
    """

    nums: tuple[int, ...]
    settings: tuple[str, ...]
    folder: Path
    every: int
    timeout_seconds: float


@dataclasses.dataclass(frozen=True)
class Start:
    """Seconds, and gigabytes of the save.

    resumed: the step that it went on from. stall: what the steps waited for the save to begin.
    whole: until it had its name. beside: the median step while it was written, next to that of a
    step before; None where there were none.
    """

    num: int
    resumed: int
    restore_seconds: float | None
    gigabytes: float
    stall_seconds: float
    written_seconds: float
    whole_seconds: float
    step_seconds: float | None
    beside_seconds: float | None


def starts(options: Options) -> Iterator[Start]:
    """One after the other, in `options.folder / "moved"`. Raises FailedError."""
    workdir = options.folder / "moved"
    for number, num in enumerate(options.nums, start=1):
        output, step = options.folder / f"moved.{number}.log", number * options.every
        saved = re.compile(SAVED.format(step=step))
        is_saved = functools.partial(_says, output, saved)
        _run_until(is_saved, num=num, workdir=workdir, output=output, options=options)
        yield _start(num, workdir, output=output, step=step, saved=saved)


def undisturbed(options: Options) -> dict[int, float]:
    """The losses of all those steps in a run that the first number of processes makes alone."""
    workdir, last = options.folder / "undisturbed", options.every * len(options.nums)
    _run_until(
        lambda: last in losses(workdir),
        num=options.nums[0],
        workdir=workdir,
        output=options.folder / "undisturbed.log",
        options=options,
        more=("--config.checkpoint.enabled=False",),
    )
    return losses(workdir)


def largest_difference(options: Options, wanted: dict[int, float]) -> float:
    """Of the losses of the run that moved from those `wanted`, relative."""
    found = losses(options.folder / "moved")
    steps = range(1, options.every * len(options.nums) + 1)
    return difference(found, {step: wanted[step] for step in steps})


def _run_until(
    is_done: Callable[[], object],
    *,
    num: int,
    workdir: Path,
    output: Path,
    options: Options,
    more: tuple[str, ...] = (),
) -> None:
    def watch(launcher: subprocess.Popen) -> None:
        # Its processes end with it.
        if launcher.poll() is None and is_done():
            launcher.kill()

    words = (*options.settings, f"--config.checkpoint.every={options.every}", *more)
    run(
        command(num, words[0], f"--workdir={workdir}", *words[1:]),
        output=output,
        timeout_seconds=options.timeout_seconds,
        # As many GPUs as processes, where there are any.
        environment={"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(num)))},
        watch=watch,
        expected=(-signal.SIGKILL,),
    )


def _says(output: Path, pattern: re.Pattern) -> bool:
    return bool(pattern.search(output.read_text(errors="replace")))


def _start(num: int, workdir: Path, *, output: Path, step: int, saved: re.Pattern) -> Start:
    """What is on record of a start that saved this step."""
    gigabytes, written, whole = map(float, saved.findall(output.read_text(errors="replace"))[-1])
    records = read_records(workdir / "metrics.jsonl")
    stalls = [
        record["checkpoint_stall_seconds"]
        for record in records
        if record["step"] == step and "checkpoint_stall_seconds" in record
    ]
    if not stalls:
        raise FailedError(f"{workdir}: metrics.jsonl has no checkpoint_stall_seconds of {step}")
    first = resumed(output)
    # The first compiles; that after the save waits for it to begin.
    before = [each for each in steps_of(records) if first + 1 < each["step"] <= step]
    beside = [each for each in steps_of(records) if step + 1 < each["step"]]
    restores = [
        each["restore_seconds"]
        for each in records
        if each["step"] == first + 1 and "restore_seconds" in each
    ]
    return Start(
        num,
        first,
        restores[-1] if restores else None,
        gigabytes,
        stalls[-1],
        written,
        whole,
        *(_median(steps) for steps in (before, beside)),
    )


def _median(steps: list[dict]) -> float | None:
    return statistics.median(step["step_seconds"] for step in steps) if steps else None


def describe(start: Start) -> str:
    """In a line."""
    began = f"went on from step {start.resumed}" if start.resumed else "began"
    restored = ""
    if start.restore_seconds is not None:
        rate = start.gigabytes / start.restore_seconds
        restored = f", restored in {start.restore_seconds:.1f} s ({rate:.1f} GB/s)"
    steps = "".join(
        f", {what} {seconds:.4f} s"
        for what, seconds in (
            ("a step takes", start.step_seconds),
            ("beside the save", start.beside_seconds),
        )
        if seconds is not None
    )
    return (
        f"{start.num} processes: {began}{restored}{steps}; saved {start.gigabytes:.1f} GB: the "
        f"steps waited {start.stall_seconds:.2f} s, written in {start.written_seconds:.1f} s "
        f"({start.gigabytes / start.written_seconds:.1f} GB/s), in place after "
        f"{start.whole_seconds:.1f} s"
    )
