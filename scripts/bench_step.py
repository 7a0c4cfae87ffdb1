"""Measures the whole training path: python scripts/bench_step.py --config configs/llama3_8b.py [--config.x=y ...]

Prints one line and, last, one JSON record: tokens/s a device (median, minimum and maximum of --steps steps after the
first --skip), MFU by both rules, seconds to compile and to the first step with an empty and with a filled compilation
cache, memory measured and predicted, and the share of a step in which communication is exposed.

This process leaves the devices alone: it starts scripts/train.py, as a user would, with checkpoints, samples and
TensorBoard off. The config and its number of steps stay as they are, so that program and learning rates are those of the
real run: it is stopped, as by Ctrl-C, when the steps that are wanted are done. A second start finds the programs of the
first in the cache.
"""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from absl import app, flags

from jaxscale.command_line import EXIT_FAILED, parse_own_flags, tell
from jaxscale.data.convert import default_cache_dir
from jaxscale.perf import bench

STEPS = flags.DEFINE_integer("steps", 20, "Steps that count.", lower_bound=1)
SKIP = flags.DEFINE_integer("skip", 10, "Steps before them that no median counts.", lower_bound=1)
WARM = flags.DEFINE_bool("warm", True, "Start a second time, with the programs in the cache.")
PROFILE = flags.DEFINE_bool(
    "profile", True, "Record three more steps, for the share of exposed communication."
)
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where the runs go and stay; without it: a temporary folder."
)
KEEP = flags.DEFINE_bool(
    "keep", False, "Keep the temporary folder: metrics, what the runs printed, the profile."
)
TIMEOUT = flags.DEFINE_float("timeout", 900, "Seconds after which a run is stopped.")
COMMIT = flags.DEFINE_string(
    "commit", "", "The commit to put on record where this is no git checkout."
)

TRAIN = Path(__file__).with_name("train.py")
PROFILED_STEPS = 3
WARM_STEPS = 3
# What leaves the steps as they are. After the user's settings: the last of two counts.
SETTINGS = (
    "--config.checkpoint.enabled=False", "--config.sample.tokens=0", "--config.log.tensorboard=False",
    "--config.log.wandb_project=", "--config.evaluation.batches=1", "--config.evaluation.every=0",
)  # fmt: skip
EXIT_INTERRUPTED = 130


def main(argv: list[str]) -> int:
    folder = make_folder()
    try:
        record = measure(argv[1:], folder)
    except bench.FailedError as error:
        return tell(error, EXIT_FAILED)
    finally:
        if WORKDIR.value or KEEP.value:
            print(f"the runs are in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    print(describe(record))
    print(json.dumps(record))
    return 0


def make_folder() -> Path:
    """A new one each time: a cache that is there already is not cold."""
    if WORKDIR.value:
        Path(WORKDIR.value).mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="bench_", dir=WORKDIR.value)).absolute()


def make_caches(folder: Path, has_gpus: bool) -> dict[str, str]:
    """An environment where nothing is kept from earlier starts (programs, autotuning, choices) but tokens of texts."""
    tokens = default_cache_dir()
    tokens.mkdir(parents=True, exist_ok=True)
    (folder / "jaxscale").mkdir(parents=True)
    (folder / "jaxscale" / "data").symlink_to(tokens)
    # Off without GPUs: a CPU's train steps, read back from the cache, have deadlocked (jaxscale/xla.py).
    programs = (
        {"JAX_COMPILATION_CACHE_DIR": str(folder / "jax")}
        if has_gpus
        else {"JAX_ENABLE_COMPILATION_CACHE": "0"}
    )
    return {"XDG_CACHE_HOME": str(folder), "CUDA_CACHE_PATH": str(folder / "cuda"), **programs}


def measure(settings: list[str], folder: Path) -> dict:
    gpus = bench.gpu_names()
    # One more than count: the last step before the profile or the end is left out (bench.summarize).
    num_steps = SKIP.value + STEPS.value + 1
    num_profiled = PROFILED_STEPS * PROFILE.value
    profile = [f"--config.profile.start={num_steps}", f"--config.profile.steps={num_profiled}"]
    caches = make_caches(folder / "caches", bool(gpus))
    cold = Run(folder / "cold", num_steps + num_profiled, caches)
    cold.train([*settings, *SETTINGS, *profile])
    warm = Run(folder / "warm", WARM_STEPS, caches)
    if (
        WARM.value and gpus
    ):  # without GPUs there is no cache, and a second start is as cold as the first
        warm.train([*settings, *SETTINGS])
    return {
        "name": "train_step",
        "settings": settings,
        "device_kind": gpus[0] if gpus else "cpu",
        "num_devices": cold.num_devices(),
        **rates(cold.steps()[:num_steps]),
        **starts("cold", cold),
        **starts("warm", warm),
        "predicted_memory_gib": cold.value("predicted_memory_gib"),
        "exposed_communication_share": exposed_share(cold.workdir / "profile")
        if num_profiled
        else None,
        **bench.provenance(COMMIT.value),
    }


class Run:
    """One run of scripts/train.py, until `num_steps` steps are done."""

    def __init__(self, workdir: Path, num_steps: int, environment: dict[str, str]):
        self.workdir = workdir
        self._environment = environment
        self.time_to_first_step_seconds: float | None = None
        self._num_steps = num_steps
        self._is_stopping = False

    def train(self, settings: list[str]) -> None:
        """Raises bench.FailedError."""
        print(f"{self.workdir.name} start, {self._num_steps} steps ...", file=sys.stderr)
        self._began = time.monotonic()
        output = self.workdir.with_suffix(".log")
        bench.run(
            [sys.executable, str(TRAIN), *settings, f"--workdir={self.workdir}"],
            output=output,
            timeout_seconds=TIMEOUT.value,
            environment=self._environment,
            watch=self._watch,
            expected=(0, EXIT_INTERRUPTED),
        )
        if len(self.steps()) < self._num_steps:
            raise bench.FailedError(
                f"the run ended after {len(self.steps())} steps and {self._num_steps} are wanted; raise "
                f"--config.steps, or lower --steps or --skip:\n{bench.tail(output)}"
            )

    def records(self) -> list[dict]:
        return bench.read_records(self.workdir / "metrics.jsonl")

    def steps(self) -> list[dict]:
        return bench.steps_of(self.records())

    def value(self, key: str):
        """The first that is on record under this key, or None."""
        return next((record[key] for record in self.records() if key in record), None)

    def _watch(self, process: subprocess.Popen) -> None:
        # The first step is on record as soon as it has ended, the others once the next is dispatched.
        num_done = len(self.steps())
        if num_done and self.time_to_first_step_seconds is None:
            self.time_to_first_step_seconds = time.monotonic() - self._began
        if num_done >= self._num_steps and not self._is_stopping:
            self._is_stopping = True
            process.send_signal(signal.SIGTERM)

    def num_devices(self) -> int:
        """Of the whole run, from what a record says of the rate of one."""
        config, record = json.loads((self.workdir / "config.json").read_text()), self.steps()[0]
        tokens_per_second = config["batch_size"] * config["seq_len"] / record["step_seconds"]
        return round(tokens_per_second / record["tokens_per_second_per_device"])


def rates(steps: list[dict]) -> dict:
    """What bench.summarize gives, under names that say what it is; None for what this device does not tell."""
    summary = bench.summarize(steps, SKIP.value)
    name = "tokens_per_second_per_device"
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
        "steps": STEPS.value,
        name: summary[name],
        f"{name}_min": summary["min"],
        f"{name}_max": summary["max"],
        **{key: summary.get(key) for key in others},
    }


def starts(name: str, run: Run) -> dict:
    """Seconds of a start: of compiling the step, with its first execution, and of all up to its end. None: not made."""
    compiling, first = run.value("compile_seconds"), run.value("step_seconds")
    return {
        f"compile_seconds_{name}": compiling,
        f"compile_and_first_step_seconds_{name}": None if compiling is None else compiling + first,
        f"time_to_first_step_seconds_{name}": run.time_to_first_step_seconds,
    }


def exposed_share(profile: Path) -> float | None:
    from jaxscale.perf import anatomy

    try:
        return anatomy.anatomy(anatomy.read(profile)).exposed_communication_share
    except ValueError as error:  # no GPU in it
        print(f"exposed communication is not known: {error}", file=sys.stderr)
        return None


def describe(record: dict) -> str:
    """The record in a line a person reads."""

    def seconds(name: str) -> str:
        both = [
            show(record[f"{name}_{start}"], "{:.1f} s") + f" {start}" for start in ("cold", "warm")
        ]
        return ", ".join(both)

    rate, low, high = (
        f"{record[f'tokens_per_second_per_device{end}']:,.0f}" for end in ("", "_min", "_max")
    )
    return (
        f"{record['num_devices']} x {record['device_kind']}: {rate} ({low} - {high}) tokens/s/device; "
        f"MFU {show(record['mfu_full'], '{:.1%}')} full, {show(record['mfu_causal'], '{:.1%}')} causal; "
        f"compiled in {seconds('compile_seconds')}; with the first step {seconds('compile_and_first_step_seconds')}; "
        f"from the start to the end of the first step {seconds('time_to_first_step_seconds')}; "
        f"memory {show(record['peak_memory_gib'], '{:.1f} GiB')}, predicted "
        f"{show(record['predicted_memory_gib'], '{:.1f} GiB')}; "
        f"communication exposed {show(record['exposed_communication_share'], '{:.1%}')}"
    )


def show(value: float | None, form: str) -> str:
    return "n/a" if value is None else form.format(value)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_own_flags)
