"""Where the records of a run go: the console, metrics.jsonl, TensorBoard, Weights & Biases.

    writers = open_writers(workdir, num_steps=..., resume_step=...)
    writers.write({"step": 7, "loss": 2.5})
    writers.close()

A record is a flat dict of numbers with its step; `Meter` makes those of training.
"""

import functools
import json
import logging
import math
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from jaxscale import distributed, files

log = logging.getLogger(__name__)


class Writer(Protocol):
    """Takes the records of a run, each a flat dict with its step."""

    def write(self, record: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


def open_writers(
    workdir: Path | str,
    *,
    num_steps: int,
    resume_step: int,
    tensorboard: bool = True,
    wandb_project: str = "",
    run_config: dict | None = None,
) -> "Writers":
    """Console, `metrics.jsonl`, TensorBoard events and optionally W&B in `workdir`.

    None on processes but the lead. resume_step: the step the state was restored from, 0 for a
    fresh start; records of later steps are dropped. What cannot be written to costs one log line:
    an absent package (with how to install it), an account that is not there, a full disk.
    """
    if not distributed.is_lead():
        return Writers([])
    workdir = Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    writers: list[Writer] = [ConsoleWriter(num_steps)]
    optional: dict[str, Callable[[], Writer]] = {
        "metrics.jsonl": lambda: JsonlWriter(workdir / "metrics.jsonl", resume_step=resume_step)
    }
    if tensorboard:
        optional["TensorBoard files"] = lambda: TensorBoardWriter(
            workdir / "tensorboard", resume_step=resume_step
        )
    if wandb_project:
        optional["Weights & Biases"] = lambda: WandbWriter(
            wandb_project, folder=workdir, run_config=run_config or {}
        )
    for name, create in optional.items():
        try:
            writers.append(create())
        except ImportError as error:
            log.warning("%s", error)
        except Exception as error:  # no account, no place to write to
            log.warning(
                "no %s: %s: %s; training goes on without it",
                name,
                type(error).__name__,
                " ".join(str(error).split()),
            )
    return Writers(writers)


class Writers:
    """Hands each record to every writer.

    One that fails is reported once, tried again each time, and stops nothing.
    """

    def __init__(self, writers: Sequence[Writer]):
        self._writers = list(writers)
        self._failed: set[int] = set()

    def write(self, record: dict[str, Any]) -> None:
        for writer in self._writers:
            self._try(writer, functools.partial(writer.write, record))

    def close(self) -> None:
        for writer in self._writers:
            self._try(writer, writer.close)
        self._writers = []

    def _try(self, writer: Writer, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if id(writer) not in self._failed:
                self._failed.add(id(writer))
                log.error(
                    "%s failed, training goes on without it: %s: %s",
                    type(writer).__name__,
                    type(error).__name__,
                    error,
                )


class ConsoleWriter:
    """A live line with a progress bar on a terminal, else plain lines.

    Plain lines come every `every_seconds`, and for the first and the last step.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        stream: TextIO | None = None,
        every_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._num_steps = num_steps
        self._stream = sys.stdout if stream is None else stream
        self._is_live = self._stream.isatty()
        # A terminal is redrawn 10 times a second at most: more would flicker, and costs over ssh.
        self._every_seconds = 0.1 if self._is_live else every_seconds
        self._clock = clock
        self._first: tuple[int, float] | None = None
        self._next_time = -math.inf
        self._has_open_line = False

    def write(self, record: dict[str, Any]) -> None:
        """A record without `loss`, an evaluation's, gets a line of its own with all its numbers."""
        if record["step"] == 0:  # the start is told in words
            return
        now = self._clock()
        if "goodput" in record or "checkpoint_stall_seconds" in record:
            return  # told at the end
        if "loss" not in record:
            self._print_line("  ".join(f"{name} {_short(value)}" for name, value in record.items()))
            return
        step = record["step"]
        self._first = self._first or (step, now)
        if now < self._next_time and step < self._num_steps:
            return
        self._next_time = now + self._every_seconds
        line = self._describe(record, now)
        if self._is_live:
            line = f"{_bar(step / self._num_steps)} {line}"
            width = shutil.get_terminal_size().columns - 1
            # Back to the margin, and erase what is left of the last line.
            self._emit(f"\r{line[:width]}\x1b[K")
            self._has_open_line = True
        else:
            self._print_line(line)

    def close(self) -> None:
        if self._has_open_line:
            self._emit("\n")
            self._has_open_line = False

    def _describe(self, record: dict[str, Any], now: float) -> str:
        step, width = record["step"], len(str(self._num_steps))
        parts = [f"step {step:>{width}}/{self._num_steps}", f"loss {record['loss']:.4f}"]
        if "tokens_per_second_per_device" in record:
            parts.append(f"{record['tokens_per_second_per_device']:,.0f} tokens/s/device")
        if "mfu_full" in record:
            parts.append(f"MFU {record['mfu_full']:.1%} full, {record['mfu_causal']:.1%} causal")
        if "peak_memory_gib" in record:
            parts.append(f"{record['peak_memory_gib']:.1f} GiB")
        first_step, first_time = self._first or (step, now)
        if step > first_step:
            # Over the whole run and by the wall clock: evaluations and checkpoints count, as there
            # will be more of them.
            seconds = (now - first_time) / (step - first_step) * (self._num_steps - step)
            parts.append(f"ETA {_duration(seconds)}")
        return "  ".join(parts)

    def _print_line(self, line: str) -> None:
        # On a terminal the live line makes room; the next record draws it again below.
        self._emit(f"\r{line}\x1b[K\n" if self._has_open_line else f"{line}\n")
        self._has_open_line = False

    def _emit(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _bar(fraction: float, *, width: int = 20) -> str:
    filled = round(min(max(fraction, 0.0), 1.0) * width)
    return f"[{'#' * filled}{'.' * (width - filled)}]"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


class JsonlWriter:
    """Appends one JSON object per line to a file and flushes it.

    JSON has no NaN or infinity: such a value is written as null (a NaN again in pandas and most
    plotting tools), and the key `non_finite` says what it was:
    {"step": 7, "loss": null, "non_finite": {"loss": "inf"}}.
    """

    def __init__(self, path: Path | str, *, resume_step: int):
        """Drops the records of steps after `resume_step` first, and a half-written line.

        What else the file held, or at a fresh start (0) held at all, is added to NAME.old.
        """
        path = Path(path)
        if path.exists():
            _drop_later_records(path, resume_step)
        self._file = open(path, "ab")
        self._has_open_line = False

    def write(self, record: dict[str, Any]) -> None:
        # After a write that failed half-way (a full disk) a record begins on a line of its own.
        start = b"\n" if self._has_open_line else b""
        self._has_open_line = True
        self._file.write(start + _to_json_line(record))
        self._file.flush()
        self._has_open_line = False

    def close(self) -> None:
        self._file.close()


def _drop_later_records(path: Path, resume_step: int) -> None:
    is_foreign, last_step = False, -1
    with open(path, "rb") as old, files.replacing(path) as new:
        for line in old:
            step = _step_of(line)
            last_step = max(last_step, -1 if step is None else step)
            if step is None:
                is_foreign |= line.endswith(b"\n")
            elif 0 < resume_step and step <= resume_step:
                new.write(line if line.endswith(b"\n") else line + b"\n")
            else:
                is_foreign |= resume_step == 0
        if is_foreign:
            _put_aside(path, last_step, resume_step=resume_step)


def _put_aside(path: Path, last_step: int, *, resume_step: int) -> None:
    """Adds all of the file to NAME.old, which may hold what another start has put there."""
    kept = path.with_name(f"{path.name}.old")
    with open(path, "rb") as old, open(kept, "ab") as file:
        shutil.copyfileobj(old, file)
    if resume_step == 0 and last_step > 0:
        log.warning(
            "%s held records up to step %d, and there is no checkpoint to go on from: this run "
            "starts at step 0, and they are in %s now",
            path,
            last_step,
            kept.name,
        )
    else:
        log.warning("%s held other records; they are in %s now", path, kept.name)


def last_step(path: Path) -> int:
    """The last step that a metrics.jsonl has a record of; 0 if there is none."""
    try:
        with open(path, "rb") as file:
            return max((_step_of(line) or 0 for line in file), default=0)
    except OSError:
        return 0


def _step_of(line: bytes) -> int | None:
    """None for what is no record."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    return step if isinstance(step, int) else None


def _to_json_line(record: dict[str, Any]) -> bytes:
    non_finite = {
        name: str(value)
        for name, value in record.items()
        if isinstance(value, float) and not math.isfinite(value)
    }
    if non_finite:
        record = record | dict.fromkeys(non_finite) | {"non_finite": non_finite}
    return json.dumps(record, allow_nan=False).encode() + b"\n"


class TensorBoardWriter:
    """TensorBoard event files through tensorboardX, which needs no TensorFlow.

    One scalar per number, named by its key.
    """

    def __init__(self, folder: Path | str, *, resume_step: int):
        """TensorBoard hides what earlier files in `folder` say about steps after `resume_step`.

        Raises ImportError if tensorboardX is not installed.
        """
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "no TensorBoard files: tensorboardX is not installed; pip install tensorboardX"
            ) from error
        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1, flush_secs=10)

    def write(self, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """Weights & Biases. A restarted run goes on under the same run id, kept in `folder`."""

    def __init__(self, project: str, *, folder: Path | str, run_config: dict):
        """Raises ImportError if wandb is not installed."""
        try:
            import wandb
        except ImportError as error:
            raise ImportError(
                "no Weights & Biases: wandb is not installed; pip install wandb"
            ) from error
        id_file = Path(folder) / "wandb_run_id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:8])
        self._run = wandb.init(
            project=project,
            dir=str(folder),
            config=run_config,
            id=id_file.read_text().strip(),
            resume="allow",
        )

    def write(self, record: dict[str, Any]) -> None:
        self._run.log(
            {name: value for name, value in record.items() if name != "step"}, step=record["step"]
        )

    def close(self) -> None:
        self._run.finish()
