"""For scripts that measure: medians of a run's records, processes that leave nothing behind, where a figure is from."""

import contextlib
import datetime
import json
import logging
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import jaxscale
from jaxscale.xla import options as xla

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]

# What may change a step's time without standing on the command line.
ENVIRONMENT = ("CUDA_", "JAX_", "NCCL_", "XLA_")


class FailedError(RuntimeError):
    """A process that was measured failed, or ran over its time; the message holds the end of what it printed."""


# Records.


def read_records(path: Path) -> list[dict]:
    """The records of a metrics.jsonl that may still be written to; none if it is not there yet."""
    try:
        lines = path.read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def steps_of(records: list[dict]) -> list[dict]:
    """The records of training steps, without those of evaluations and the like."""
    return [record for record in records if "step_seconds" in record]


def summarize(steps: list[dict], skip: int) -> dict[str, float]:
    """Medians of the steps after `skip` but the last; the rate's spread; the share of a step spent waiting for data.

    Nothing is dispatched after the last step (of a run, or before a pause), so the host notices its end sooner, and its
    time comes out short by the host's lag.
    """
    counted = steps[skip:-1]

    def median(key):
        return statistics.median(record[key] for record in counted)

    rates = [record["tokens_per_second_per_device"] for record in counted]
    report = {
        "tokens_per_second_per_device": median("tokens_per_second_per_device"),
        "min": min(rates),
        "max": max(rates),
        "step_seconds": median("step_seconds"),
        "first_step_seconds": steps[0]["step_seconds"],
        "data_wait_share": median("data_wait_seconds") / median("step_seconds"),
    }
    for key in ("mfu_full", "mfu_causal", "peak_memory_gib"):
        if key in steps[-1]:
            report[key] = median(key)
    return report | {
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "steps": len(steps),
    }


# Processes.


def run(
    command: list[str],
    *,
    output: Path,
    timeout_seconds: float,
    environment: dict[str, str] | None = None,
    watch: Callable[[subprocess.Popen], None] = lambda process: None,
    expected: tuple[int, ...] = (0,),
    folder: Path | None = None,
) -> None:
    """Runs a command, what it prints goes to the file `output`; in no case is anything that it started left running.

    environment: besides this process's. watch: called with the process 20 times a second, and when it has ended.
    folder: to run it in. Raises FailedError for an exit code that is not expected, or when the time is up.
    """
    # torchrun starts its workers in sessions of their own: ending a process group would leave them on the GPUs. What
    # has this variable in its environment was started here.
    mark = f"JAXSCALE_BENCH_{uuid.uuid4().hex}"
    env = os.environ | (environment or {}) | {mark: "1"}
    deadline = time.monotonic() + timeout_seconds
    with _signals_raise(), open(output, "wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=env, cwd=folder,
            start_new_session=True,
        )  # fmt: skip
        try:
            watch(process)
            while (code := process.poll()) is None and time.monotonic() < deadline:
                time.sleep(0.05)
                watch(process)
        finally:
            _kill(process, mark)
    if code not in expected:
        fate = (
            f"took over {timeout_seconds:g} s and was stopped"
            if code is None
            else f"failed with exit code {code}"
        )
        raise FailedError(
            f"{shlex.join(map(str, command))}\n{fate}; the last lines it printed:\n{tail(output)}"
        )


def tail(output: Path, num_lines: int = 60) -> str:
    return "\n".join(
        f"| {line}" for line in output.read_text(errors="replace").splitlines()[-num_lines:]
    )


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP end this process by an exception, as Ctrl-C does, so that what it started ends with it."""

    def leave(signum, frame):
        sys.exit(128 + signum)

    # One that is ignored stays so: `nohup` ignores SIGHUP.
    heard = [
        signum
        for signum in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(signum) != signal.SIG_IGN
    ]
    previous = {signum: signal.signal(signum, leave) for signum in heard}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(
                signum, signal.SIG_DFL if handler is None else handler
            )  # None: not set by Python


def _kill(process: subprocess.Popen, mark: str) -> None:
    process.kill()
    process.wait()
    # More than once: one of them may just have started another.
    for _ in range(200):
        marked = _marked(mark.encode())
        if not marked:
            return
        for pid in marked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    log.warning("processes %s that %s started cannot be ended", marked, process.args)


def _marked(mark: bytes) -> list[int]:
    """The processes that have this variable in their environment; those that are dead have none."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours
            if mark in path.read_bytes():
                found.append(int(path.parent.name))
    return found


# Where a figure is from.


def provenance(commit: str = "") -> dict:
    """Date, command, commit, versions, driver, a run's environment. commit: what to say where there is no git."""
    ours = {variable.name: variable.value for variable in xla.ENVIRONMENT}
    theirs = {name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT)}
    found = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shown([sys.executable, *sys.argv]),
        "commit": commit or found or None,
        "is_dirty": bool(_output("git", "-C", str(ROOT), "status", "--porcelain"))
        if found and not commit
        else None,
        "driver": next(iter(_query("driver_version")), None),
        "python": platform.python_version(),
        "versions": {"jaxscale": jaxscale.__version__}
        | {name: _version(name) for name in ("jax", "jaxlib", "flax", "optax")},
        "environment": dict(sorted((ours | theirs).items())),
    }


def shown(command: Sequence[object]) -> str:
    """The command as a user would type it in the checkout: a record keeps no path of the machine it was made on."""
    python = {sys.executable, str(Path(sys.executable).resolve())}
    words = [
        "python" if word in python else word.removeprefix(f"{ROOT}/") for word in map(str, command)
    ]
    return shlex.join(words)


def gpu_names() -> list[str]:
    """Of the GPUs that a run here would see, without touching them; none where JAX is told to use the CPU."""
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return []
    names = _query("name")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (
        names
        if visible is None
        else names[: len([part for part in visible.split(",") if part.strip()])]
    )


def used_memory_gib() -> float | None:
    """Of the fullest GPU; None if nvidia-smi does not say."""
    used = [float(number) for number in _query("memory.used") if number.replace(".", "").isdigit()]
    return max(used) / 1024 if used else None


def _query(field: str) -> list[str]:
    return _output(
        "nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"
    ).splitlines()


def _output(*command: str) -> str:
    """What it prints; nothing if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(name: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None
