"""The whole training path, measured from outside: scripts/train.py started, watched and stopped.

This process leaves the devices alone. The config and its number of steps stay as they are, so that
program and learning rates are those of the real run: it is stopped, as by Ctrl-C, when the steps
that are wanted are done. A second start finds the programs of the first in the cache.
"""

import contextlib
import dataclasses
import json
import logging
import math
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxscale.data.convert import default_cache_dir
from jaxscale.launch import EXIT_AGAIN
from jaxscale.perf import processes
from jaxscale.perf.gpus import gpu_names
from jaxscale.perf.provenance import provenance
from jaxscale.perf.records import RATE, Record, read_records, steps_of, summarize

log = logging.getLogger(__name__)

PROFILED_STEPS = 3
WARM_STEPS = 3
# These leave the steps as they are. They follow the user's settings: the last of two counts.
SETTINGS = (
    "--config.checkpoint.enabled=False",
    "--config.sample.tokens=0",
    "--config.log.tensorboard=False",
    "--config.log.wandb_project=",
    "--config.evaluation.batches=1",
    "--config.evaluation.every=0",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What is wanted of a measurement.

    train: the script that trains. num_steps: that count, after `skip` that do not. has_warm_start:
    start again with the programs in the cache. has_profile: record three more steps. workdir: where
    the runs stay; if None they are in a temporary folder, which goes unless it is kept. commit: to
    put on record where there is no git.
    """

    train: Path
    num_steps: int
    skip: int
    has_warm_start: bool = True
    has_profile: bool = True
    workdir: str | None = None
    is_kept: bool = False
    timeout_seconds: float = 900
    commit: str = ""


def measure(settings: list[str], options: Options) -> Record:
    """The record of a config that these words of a command line name.

    Raises processes.FailedError where the run fails, or ends before the steps are done.
    """
    with _folder(options) as folder:
        return _measure_in(folder, settings=settings, options=options)


@contextlib.contextmanager
def _folder(options: Options) -> Iterator[Path]:
    """A new one each time: a cache that is there already is not cold."""
    if options.workdir:
        Path(options.workdir).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench_", dir=options.workdir)).absolute()
    try:
        yield folder
    finally:
        if options.workdir or options.is_kept:
            log.info("the runs are in %s", folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _measure_in(folder: Path, *, settings: list[str], options: Options) -> Record:
    gpus = gpu_names()
    # One more than count: `summarize` leaves out the last before the profile or the end.
    num_steps = options.skip + options.num_steps + 1
    num_profiled = PROFILED_STEPS * options.has_profile
    profile = [f"--config.profile.start={num_steps}", f"--config.profile.steps={num_profiled}"]
    caches = _make_caches(folder / "caches", has_gpus=bool(gpus))
    cold = Run(folder / "cold", num_steps=num_steps + num_profiled, environment=caches)
    cold.train([*settings, *SETTINGS, *profile], options)
    warm = Run(folder / "warm", num_steps=WARM_STEPS, environment=caches)
    # Without GPUs there is no cache, and a second start is as cold as the first.
    if options.has_warm_start and gpus:
        warm.train([*settings, *SETTINGS], options)
    return {
        "name": "train_step",
        "settings": settings,
        "device_kind": gpus[0] if gpus else "cpu",
        "num_devices": cold.num_devices(),
        **_rates(cold.steps()[:num_steps], options),
        **_starts("cold", cold),
        **_starts("warm", warm),
        "predicted_memory_gib": cold.value("predicted_memory_gib"),
        "exposed_communication_share": _exposed_share(cold) if num_profiled else None,
        **provenance(commit=options.commit),
    }


def _make_caches(folder: Path, *, has_gpus: bool) -> dict[str, str]:
    """An environment where nothing is kept from earlier starts but the tokens of texts."""
    tokens = default_cache_dir()
    tokens.mkdir(parents=True, exist_ok=True)
    (folder / "jaxscale").mkdir(parents=True)
    (folder / "jaxscale" / "data").symlink_to(tokens)
    caches = {"XDG_CACHE_HOME": str(folder), "CUDA_CACHE_PATH": str(folder / "cuda")}
    if has_gpus:
        return caches | {"JAX_COMPILATION_CACHE_DIR": str(folder / "jax")}
    # Programs of a CPU are not cached: read back, they have deadlocked (jaxscale/xla/options.py).
    return caches | {"JAX_ENABLE_COMPILATION_CACHE": "0"}


class Run:
    """One run of scripts/train.py, until `num_steps` steps are done."""

    def __init__(self, workdir: Path, *, num_steps: int, environment: dict[str, str]):
        self.workdir = workdir
        self.time_to_first_step_seconds: float | None = None
        self._num_steps = num_steps
        self._environment = environment
        self._began = math.nan
        self._is_stopping = False

    def train(self, settings: list[str], options: Options) -> None:
        """Raises processes.FailedError."""
        log.info("%s start, %d steps ...", self.workdir.name, self._num_steps)
        self._began = time.monotonic()
        output = self.workdir.with_suffix(".log")
        processes.run(
            [sys.executable, str(options.train), *settings, f"--workdir={self.workdir}"],
            output=output,
            timeout_seconds=options.timeout_seconds,
            environment=self._environment,
            watch=self._watch,
            expected=(0, EXIT_AGAIN),
        )
        if (num_done := len(self.steps())) < self._num_steps:
            raise processes.FailedError(
                f"the run ended after {num_done} steps and {self._num_steps} are wanted; raise "
                f"--config.steps, or lower --steps or --skip:\n{processes.tail(output)}"
            )

    def records(self) -> list[Record]:
        return read_records(self.workdir / "metrics.jsonl")

    def steps(self) -> list[Record]:
        return steps_of(self.records())

    def value(self, key: str) -> Any:
        """The first that is on record under this key, or None."""
        return next((record[key] for record in self.records() if key in record), None)

    def num_devices(self) -> int:
        """Of the whole run, from what a record says of the rate of one."""
        config, record = json.loads((self.workdir / "config.json").read_text()), self.steps()[0]
        tokens_per_second = config["batch_size"] * config["seq_len"] / record["step_seconds"]
        return round(tokens_per_second / record[RATE])

    def _watch(self, process: subprocess.Popen) -> None:
        # The first step is on record once it has ended, the others once the next is dispatched.
        num_done = len(self.steps())
        if num_done and self.time_to_first_step_seconds is None:
            self.time_to_first_step_seconds = time.monotonic() - self._began
        if num_done >= self._num_steps and not self._is_stopping:
            self._is_stopping = True
            process.send_signal(signal.SIGTERM)


def _rates(steps: list[Record], options: Options) -> Record:
    """What `summarize` gives, under names that say what it is; None for what is not known."""
    summary = summarize(steps, skip=options.skip)
    others = (
        "mfu_full",
        "mfu_causal",
        "step_seconds",
        "data_wait_share",
        "peak_memory_gib",
        "first_loss",
        "last_loss",
    )
    return {
        "steps": options.num_steps,
        RATE: summary[RATE],
        f"{RATE}_min": summary["min"],
        f"{RATE}_max": summary["max"],
        **{key: summary.get(key) for key in others},
    }


def _starts(name: str, run: Run) -> dict[str, float | None]:
    """Seconds of compiling, of that and the first step, of all up to its end; None: not made."""
    compiling, first = run.value("compile_seconds"), run.value("step_seconds")
    return {
        f"compile_seconds_{name}": compiling,
        f"compile_and_first_step_seconds_{name}": None if compiling is None else compiling + first,
        f"time_to_first_step_seconds_{name}": run.time_to_first_step_seconds,
    }


def _exposed_share(run: Run) -> float | None:
    # Imported late, as they import jax: a run that fails is told seconds earlier.
    from jaxscale.perf.anatomy import anatomy
    from jaxscale.perf.trace import read

    try:
        return anatomy(read(run.workdir / "profile")).exposed_communication_share
    except ValueError as error:  # no GPU in it
        log.warning("exposed communication is not known: %s", error)
        return None


def describe(record: Record) -> str:
    """The record in a line a person reads."""
    rate, low, high = (f"{record[f'{RATE}{end}']:,.0f}" for end in ("", "_min", "_max"))
    memory, predicted = (
        _shown(record[key], "{:.1f} GiB") for key in ("peak_memory_gib", "predicted_memory_gib")
    )
    return "; ".join(
        [
            f"{record['num_devices']} x {record['device_kind']}: {rate} ({low} - {high}) "
            "tokens/s/device",
            f"MFU {_shown(record['mfu_full'], '{:.1%}')} full, "
            f"{_shown(record['mfu_causal'], '{:.1%}')} causal",
            f"compiled in {_both_starts(record, 'compile_seconds')}",
            f"with the first step {_both_starts(record, 'compile_and_first_step_seconds')}",
            "from the start to the end of the first step "
            + _both_starts(record, "time_to_first_step_seconds"),
            f"memory {memory}, predicted {predicted}",
            f"communication exposed {_shown(record['exposed_communication_share'], '{:.1%}')}",
        ]
    )


def _both_starts(record: Record, name: str) -> str:
    return ", ".join(
        f"{_shown(record[f'{name}_{start}'], '{:.1f} s')} {start}" for start in ("cold", "warm")
    )


def _shown(value: float | None, form: str) -> str:
    return "n/a" if value is None else form.format(value)
