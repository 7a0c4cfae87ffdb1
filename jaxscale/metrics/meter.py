"""What a run reports: step time, tokens/s, MFU and memory, and where the records go.

    meter = Meter(num_devices=..., tokens_per_step=..., devices=jax.local_devices(), flops_per_token_full=..., ...)
    writers = open_writers(workdir, num_steps=..., resume_step=...)
    for step in ...:
        state, device_metrics = train_step(state, batch)
        for record in meter.record(step, device_metrics, data_wait_seconds):  # the steps that have finished
            writers.write(record)
    for record in meter.flush(): ...

A record is a flat dict of numbers: step and the scalars that the step returned (loss, grad_norm, learning_rate, tokens:
those that counted in the loss), then step_seconds, data_wait_seconds, tokens_per_second_per_device, and where they are
known mfu_full, mfu_causal, live_memory_gib, peak_memory_gib. MFU on a CPU is left out, not made up. The first record of a
process also has compile_seconds and predicted_memory_gib, of its step (`train/fit.py`).
"""

import collections
import functools
import json
import logging
import math
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

import jax
import numpy as np

from jaxscale import distributed

log = logging.getLogger(__name__)

# Dense bf16 FLOP/s without sparsity, from the makers' data sheets, by a part of jax.Device.device_kind.
PEAK_FLOPS = {
    "A100": 312e12,
    "H20": 148e12,
    "H100": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H200": 989e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "L40S": 362e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 FLOP/s of a device (`jax.Device.device_kind`); None if unknown, such as for a CPU."""
    # The longest name first: `H200` holds `H20`, and `H100 PCIe` holds `H100`.
    names = sorted((name for name in PEAK_FLOPS if name in device_kind), key=len)
    return PEAK_FLOPS[names[-1]] if names else None


def mfu(
    tokens_per_second_per_device: float, flops_per_token: float, peak: float | None
) -> float | None:
    """Model FLOPs utilisation as a fraction (PaLM, appendix B); None where the device's peak is not known.

    `flops_per_token` counts forward and backward without recomputation, by one of two rules: mfu_full counts attention
    over the whole sequence square, as torchtitan prints; mfu_causal the half below the diagonal, which has to run.
    """
    return None if peak is None else tokens_per_second_per_device * flops_per_token / peak


def memory_gib(devices: Iterable[jax.Device]) -> tuple[float, float] | None:
    """(memory in use, its peak since the start) in GiB, of the fullest device; None if it does not say (CPU)."""
    stats = [device.memory_stats() for device in devices]
    if not stats or not all(stats):
        return None
    return max(s["bytes_in_use"] for s in stats) / 2**30, max(
        s["peak_bytes_in_use"] for s in stats
    ) / 2**30


class Meter:
    """Turns the device scalars of each step into a record, one step late, so that reading them never stalls the device.

    The scalars of step n are read after step n+1 has been dispatched: while the host waits for them the device has the
    next step to do. The moment they arrive is when step n ended, and step_seconds is the time between two such moments.
    (With CUDA_DEVICE_MAX_CONNECTIONS=1 and several GPUs they arrive behind the launches of step n+1, each as late.)
    """

    def __init__(
        self,
        *,
        num_devices: int,
        tokens_per_step: int,
        flops_per_token_full: float,
        flops_per_token_causal: float,
        devices: Sequence[jax.Device],
        clock: Callable[[], float] = time.perf_counter,
    ):
        """num_devices: of the whole run. devices: the local ones, which tell the peak FLOP/s and the memory.

        tokens_per_step: rows times their length, whether a token counts in the loss or not: what peers count.

        The clock starts here, and the first step_seconds has all that comes between this and the end of the first step.
        """
        self._num_devices = num_devices
        self._tokens_per_step = tokens_per_step
        self._flops_per_token_full = flops_per_token_full
        self._flops_per_token_causal = flops_per_token_causal
        self._devices = devices
        self._peak_flops = peak_flops(devices[0].device_kind)
        self._clock = clock
        self._pending: collections.deque[tuple[int, dict[str, jax.Array], float]] = (
            collections.deque()
        )
        self._last_end = clock()

    def record(
        self, step: int, device_metrics: dict[str, jax.Array], data_wait_seconds: float
    ) -> list[dict[str, Any]]:
        """Takes the scalars of the step just dispatched; returns the record of the step before, if there was one.

        device_metrics: 0-d arrays. Waits for the step before this one. Every process calls it; all get the same values,
        but each its own times and memory.
        """
        for value in device_metrics.values():
            value.copy_to_host_async()
        self._pending.append((step, device_metrics, data_wait_seconds))
        return [self._finish() for _ in range(len(self._pending) - 1)]

    def flush(self) -> list[dict[str, Any]]:
        """The record still outstanding; waits for the device. For before an evaluation, or the end of the run."""
        return [self._finish() for _ in range(len(self._pending))]

    def restart(self) -> None:
        """Starts the clock anew, so that what was done since flush() (an evaluation) is no part of a step's time."""
        assert not self._pending, "flush() first"
        self._last_end = self._clock()

    def _finish(self) -> dict[str, Any]:
        step, device_metrics, data_wait_seconds = self._pending.popleft()
        values = {
            name: np.asarray(value).item() for name, value in device_metrics.items()
        }  # waits for the step
        end = self._clock()
        step_seconds, self._last_end = end - self._last_end, end
        rate = self._tokens_per_step / step_seconds / self._num_devices
        record = {"step": step, **values}
        record |= {
            "step_seconds": step_seconds,
            "data_wait_seconds": data_wait_seconds,
            "tokens_per_second_per_device": rate,
        }
        if self._peak_flops is not None:
            record["mfu_full"] = mfu(rate, self._flops_per_token_full, self._peak_flops)
            record["mfu_causal"] = mfu(rate, self._flops_per_token_causal, self._peak_flops)
        memory = memory_gib(self._devices)
        if memory is not None:
            record["live_memory_gib"], record["peak_memory_gib"] = memory
        return record


# Writers.


class Writer(Protocol):
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
    """Console, `metrics.jsonl`, TensorBoard events and optionally W&B in `workdir`; none on processes but the lead.

    resume_step: the step the state was restored from, 0 for a fresh start; records of later steps are dropped.
    An absent optional package costs one log line that says how to install it.
    """
    if not distributed.is_lead():
        return Writers([])
    workdir = Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    writers: list[Writer] = [
        ConsoleWriter(num_steps),
        JsonlWriter(workdir / "metrics.jsonl", resume_step=resume_step),
    ]
    optional: list[Callable[[], Writer]] = []
    if tensorboard:
        optional.append(lambda: TensorBoardWriter(workdir / "tensorboard", resume_step=resume_step))
    if wandb_project:
        optional.append(
            lambda: WandbWriter(wandb_project, folder=workdir, run_config=run_config or {})
        )
    for create in optional:
        try:
            writers.append(create())
        except ImportError as error:
            log.warning("%s", error)
    return Writers(writers)


class Writers:
    """Hands each record to every writer. One that fails is reported once, tried again each time, and stops nothing."""

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
                log.error("%s failed, training goes on without it: %s: %s",
                          type(writer).__name__, type(error).__name__, error)  # fmt: skip


class ConsoleWriter:
    """A live line with a progress bar on a terminal; else a plain line every `every_seconds`, first and last step."""

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
        # A terminal is redrawn 10 times a second at most: more would only flicker, and costs over ssh.
        self._every_seconds = 0.1 if self._is_live else every_seconds
        self._clock = clock
        self._first: tuple[int, float] | None = None
        self._next_time = -math.inf
        self._has_open_line = False

    def write(self, record: dict[str, Any]) -> None:
        """A record without `loss` (an evaluation's) gets a line of its own, with all its numbers."""
        now = self._clock()
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
            line = f"{_bar(step / self._num_steps)} {line}"[
                : shutil.get_terminal_size().columns - 1
            ]
            self._emit(
                f"\r{line}\x1b[K"
            )  # back to the margin, and erase what is left of the last line
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
            # Over the whole run and by the wall clock: evaluations and checkpoints count, as they will again.
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


def _bar(fraction: float, width: int = 20) -> str:
    filled = round(min(max(fraction, 0.0), 1.0) * width)
    return f"[{'#' * filled}{'.' * (width - filled)}]"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


class JsonlWriter:
    """Appends one JSON object per line to a file and flushes it.

    JSON has no NaN or infinity: such a value is written as null (a NaN again in pandas and most plotting tools), and
    the key `non_finite` says what it was: {"step": 7, "loss": null, "non_finite": {"loss": "inf"}}.
    """

    def __init__(self, path: Path | str, *, resume_step: int):
        """Drops the records of steps after `resume_step` first, and half-written lines, in one atomic replacement."""
        path = Path(path)
        if path.exists():
            _drop_later_records(path, resume_step)
        self._file = open(path, "ab")
        self._has_open_line = False

    def write(self, record: dict[str, Any]) -> None:
        # After a write that failed half-way (a full disk), the rest of its line must not swallow this record.
        start = b"\n" if self._has_open_line else b""
        self._has_open_line = True
        self._file.write(start + _to_json_line(record))
        self._file.flush()
        self._has_open_line = False

    def close(self) -> None:
        self._file.close()


def _drop_later_records(path: Path, resume_step: int) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    with open(path, "rb") as old, open(temporary, "wb") as new:
        for line in old:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and record.get("step", 0) <= resume_step:
                new.write(line if line.endswith(b"\n") else line + b"\n")
        new.flush()
        os.fsync(new.fileno())
    temporary.replace(path)


def _to_json_line(record: dict[str, Any]) -> bytes:
    non_finite = {
        name: str(v) for name, v in record.items() if isinstance(v, float) and not math.isfinite(v)
    }
    if non_finite:
        record = record | dict.fromkeys(non_finite) | {"non_finite": non_finite}
    return json.dumps(record, allow_nan=False).encode() + b"\n"


class TensorBoardWriter:
    """TensorBoard event files through tensorboardX: one scalar per number, named by its key. Needs no TensorFlow."""

    def __init__(self, folder: Path | str, *, resume_step: int):
        """TensorBoard hides what earlier files in `folder` say about steps after `resume_step`. Raises ImportError."""
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
