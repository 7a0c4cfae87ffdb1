"""Runs of several processes on this machine, one of which is broken: what the others say, and when.

Then the same command goes on, and its losses are compared with those of a run that nothing happened
to: the same bits on CPUs, and on GPUs with config.deterministic.
"""

import dataclasses
import os
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from jaxscale.launch import EXIT_AGAIN
from jaxscale.perf.local_runs import command, difference, losses, resumed
from jaxscale.perf.processes import run

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
FAULTS = (*SIGNALS, "hang", "memory")
# What a launcher may end with: a process that failed by itself, that was killed, that left others.
ENDS = (1, EXIT_AGAIN, 128 + signal.SIGKILL)

# Before a config: in one process, at one step, a thread of C keeps Python to itself for good, or
# its devices have no memory left.
_BREAK = """
import ctypes
import os

import jax
import jax.numpy as jnp

from jaxscale.train.recorder import Recorder


def _step(self, step, metrics, *, state, original=Recorder.step):
    fault, process, at = os.environ.get("JAXSCALE_BREAK", "none:0:0").split(":")
    is_gpu = jax.default_backend() == "gpu"
    size = 2**30 if is_gpu else 2**50
    # On GPUs a process that compiles alone waits for what the others have timed, for good.
    if fault == "memory" and step == 1 and is_gpu:
        jnp.zeros(size, jnp.int8)
    if step == int(at) and os.environ["JAXSCALE_PROCESS_ID"] == process:
        print("broken now", flush=True)
        taken = []
        while fault == "memory":
            taken.append(jnp.zeros(size, jnp.int8).block_until_ready())
        lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
        lock(mutex), lock(mutex)
    return original(self, step, metrics, state=state)


Recorder.step = _step
"""


@dataclasses.dataclass(frozen=True)
class Options:
    """num: processes. settings: of scripts/train.py, `--config=FILE` first, without a workdir.

    step: that was done when one is broken. timeout_seconds: of each run.
    """

    num: int
    settings: tuple[str, ...]
    folder: Path
    step: int
    timeout_seconds: float


@dataclasses.dataclass(frozen=True)
class Trial:
    """named_seconds: from the fault until another process has said who it is, in these words.

    left_seconds: until no process is left. resumed: the step that the next start went on from;
    reached: the last one before.
    difference: the largest relative one of a loss from that of the undisturbed run.
    """

    fault: str
    process: int
    named_seconds: float
    left_seconds: float
    words: str
    reached: int
    resumed: int
    difference: float


def undisturbed(options: Options) -> dict[int, float]:
    """The losses of a run that nothing happens to. Raises FailedError."""
    workdir = options.folder / "undisturbed"
    _run(options, workdir, expected=(0,))
    return losses(workdir)


def try_fault(fault: str, process: int, *, options: Options, wanted: dict[int, float]) -> Trial:
    """Breaks that process of a run, and has the run go on. Raises FailedError, ValueError."""
    workdir = options.folder / f"{fault}_{process}_{time.time_ns()}"
    breaking = _Breaking(fault, process, workdir=workdir, step=options.step)
    _run(options, workdir, expected=ENDS, breaking=breaking)
    left = time.monotonic()
    if breaking.broken_at is None or breaking.named_at is None:
        said = breaking.output.read_text(errors="replace")
        raise ValueError(f"{fault} of process {process} was named by nobody:\n{said[-3000:]}")
    reached = max(losses(workdir))
    _run(options, workdir, expected=(0,))
    found = losses(workdir)
    if list(found) != list(wanted):
        raise ValueError(f"{workdir}: {len(found)} steps are on record, {len(wanted)} undisturbed")
    return Trial(
        fault,
        process,
        breaking.named_at - breaking.broken_at,
        left - breaking.broken_at,
        breaking.words,
        reached,
        resumed(workdir.with_suffix(".2.log")),
        difference(found, wanted),
    )


class _Breaking:
    """What happens to a run while it goes on: called again and again."""

    def __init__(self, fault: str, process: int, *, workdir: Path, step: int):
        self._fault, self._process, self._workdir, self._step = fault, process, workdir, step
        self.output = workdir.with_suffix(".1.log")
        self.broken_at: float | None = None
        self.named_at: float | None = None
        self.words = ""
        self.environment = {"JAXSCALE_BREAK": f"{fault}:{process}:{step + 1}"}
        if fault in SIGNALS:
            self.environment = {}

    def __call__(self, launcher: subprocess.Popen) -> None:
        if self.broken_at is None:
            self._break(launcher)
        elif self.named_at is None:
            said = self.output.read_text(errors="replace")
            name = rf"process {self._process} \(host [^)]*\) [^\n;]*"
            others = rf"^\[(?!{self._process}\])\d+\] error: ({name})"
            if found := re.search(others, said, re.MULTILINE):
                self.named_at, self.words = time.monotonic(), found[1]

    def _break(self, launcher: subprocess.Popen) -> None:
        if self._fault not in SIGNALS:
            if "broken now" in self.output.read_text(errors="replace"):
                self.broken_at = time.monotonic()
        elif max(losses(self._workdir), default=0) >= self._step:
            self.broken_at = time.monotonic()
            os.kill(_children(launcher.pid)[self._process], SIGNALS[self._fault])


def _run(
    options: Options,
    workdir: Path,
    *,
    expected: tuple[int, ...],
    breaking: _Breaking | None = None,
) -> None:
    config, *settings = options.settings
    broken = options.folder / "broken_config.py"
    broken.write_text(_BREAK + Path(config.removeprefix("--config=")).read_text())
    number = 2 if breaking is None and workdir.exists() else 1
    run(
        command(options.num, f"--config={broken}", f"--workdir={workdir}", *settings),
        output=workdir.with_suffix(f".{number}.log"),
        timeout_seconds=options.timeout_seconds,
        environment=breaking.environment if breaking else None,
        watch=breaking or (lambda process: None),
        expected=expected,
    )


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def table(trials: Iterable[Trial]) -> str:
    """A line for each fault: medians and worst."""
    lines = [
        "| fault | trials | named by the others: median, most (s) | all have left: most (s) | "
        "steps done again: most | largest difference of a loss |",
        "|---|---|---|---|---|---|",
    ]
    trials = list(trials)
    for fault in dict.fromkeys(trial.fault for trial in trials):
        of_fault = [trial for trial in trials if trial.fault == fault]
        named = [trial.named_seconds for trial in of_fault]
        lines.append(
            f"| {fault} | {len(of_fault)} | {statistics.median(named):.1f}, {max(named):.1f} | "
            f"{max(trial.left_seconds for trial in of_fault):.1f} | "
            f"{max(trial.reached - trial.resumed for trial in of_fault)} | "
            f"{max(trial.difference for trial in of_fault):.1e} |"
        )
    return "\n".join(lines)


def describe(trial: Trial) -> str:
    """In a line."""
    return (
        f"{trial.fault} of process {trial.process}: named after {trial.named_seconds:.2f} s "
        f"({trial.words!r}), all left after {trial.left_seconds:.2f} s; at step {trial.reached}, "
        f"went on from step {trial.resumed}, losses to {trial.difference:.1e}"
    )
