"""Processes that are measured: started, watched, ended with all that they started."""

import contextlib
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

log = logging.getLogger(__name__)


class FailedError(RuntimeError):
    """What was to be measured failed; of a process the message holds the end of its output.

    code: its exit code; None if it ran out of time, or no process failed.
    """

    def __init__(self, message: str, *, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


def run(
    command: Sequence[str],
    *,
    output: Path,
    timeout_seconds: float,
    environment: dict[str, str] | None = None,
    watch: Callable[[subprocess.Popen], None] = lambda process: None,
    expected: tuple[int, ...] = (0,),
    folder: Path | None = None,
) -> None:
    """Runs a command; in no case is anything that it started left running.

    output: the file that gets what it prints. environment: besides this process's. watch: called
    with the process 20 times a second, and when it has ended. folder: to run it in. Raises
    FailedError for an exit code that is not expected, or when the time is up.
    """
    # A mark in the environment tells what was started here. A process group would not: torchrun
    # starts its workers in sessions of their own, which would stay on the GPUs.
    mark = f"JAXSCALE_BENCH_{uuid.uuid4().hex}"
    env = os.environ | (environment or {}) | {mark: "1"}
    deadline = time.monotonic() + timeout_seconds
    with _signals_raise(), open(output, "wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=folder,
            start_new_session=True,
        )
        try:
            watch(process)
            while (code := process.poll()) is None and time.monotonic() < deadline:
                time.sleep(0.05)
                watch(process)
        finally:
            _end(process, mark)
    if code not in expected:
        raise FailedError(
            f"{shlex.join(map(str, command))}\n{_fate(code, timeout_seconds)}; "
            f"the last lines it printed:\n{tail(output)}",
            code=code,
        )


def tail(output: Path, *, num_lines: int = 60) -> str:
    """The last lines of a file, marked as quoted."""
    lines = output.read_text(errors="replace").splitlines()[-num_lines:]
    return "\n".join(f"| {line}" for line in lines)


def output_of(*command: str) -> str:
    """What a command prints; empty if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _fate(code: int | None, timeout_seconds: float) -> str:
    if code is None:
        return f"took over {timeout_seconds:g} s and was stopped"
    return f"failed with exit code {code}"


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, as Ctrl-C raises, so that what was started is ended."""

    def leave(signum: int, frame: object) -> None:
        sys.exit(128 + signum)

    # A signal that is ignored stays so: `nohup` ignores SIGHUP.
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
            # None stands for a handler that Python did not set.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)


def _end(process: subprocess.Popen, mark: str) -> None:
    process.kill()
    process.wait()
    # Ended more than once: one of them may just have started another.
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
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark in path.read_bytes():
                found.append(int(path.parent.name))
    return found
