"""Runs of scripts/train.py as forks of one process that has imported what they import.

Unlike those of tests/forks.py they are killed, from outside or at a moment of their own, and what
they say is kept with the time at which they said it.
"""

import dataclasses
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE = 300

# A line of its input is a command, or the number of a process that it is to wait for.
SERVER = """
import json, os, runpy, signal, sys, traceback, warnings
import grain, jax, orbax.checkpoint, ml_collections
import jaxscale.train.loop
from jax._src import xla_bridge
from jaxscale.xla.environment import set_environment
from tests.faults import inside
set_environment()
warnings.simplefilter("ignore", RuntimeWarning)
assert not xla_bridge.backends_are_initialized()
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if isinstance(asked, int):
        print(os.waitpid(asked, 0)[1], flush=True)
        continue
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor in (1, 2):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            os.dup2(os.open(asked["output"], flags), descriptor)
        os.chdir(asked["folder"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv, code = asked["argv"], 0
        try:
            inside.prepare(**asked["inside"])
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as error:
            code = error.code or 0
        except BaseException:
            traceback.print_exc()
            code = 99
        sys.stdout.flush()
        os._exit(code)
    print(child, flush=True)
"""


@dataclasses.dataclass
class Ended:
    """How a child ended. code: negative for a signal. said: (seconds since its start, line)."""

    code: int
    output: str
    said: list[tuple[float, str]]
    seconds: float
    was_in_save: bool = False

    def seconds_to(self, text: str) -> float:
        """Until it said that; a failure if it did not."""
        for seconds, line in self.said:
            if text in line:
                return seconds
        assert text in self.output, f"{text!r} was not said:\n{self.output}"
        return self.seconds


class Children:
    """Context: the process that forks."""

    def __init__(self, outputs: Path):
        self._folder = outputs
        self._outputs = (outputs / str(number) for number in itertools.count())

    def __enter__(self):
        # One device: forks are many, and what is tried here does not depend on the layout. Alone, a
        # device has no collectives, in which programs of JAX's cache may wait for ever.
        flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=1"
        cache = {
            "JAX_ENABLE_COMPILATION_CACHE": "true",
            "JAX_COMPILATION_CACHE_DIR": str(self._folder / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)} | cache,
        )
        assert self._answer() == "ready"
        return self

    def __exit__(self, *error):
        self._server.__exit__(*error)

    def _answer(self) -> str:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line, "the process that forks has died"
        return line.strip()

    def _ask(self, what) -> str:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(what) + "\n")
        self._server.stdin.flush()
        return self._answer()

    def run(
        self,
        folder: Path,
        *settings: str,
        kill_after: float | None = None,
        signum: int = signal.SIGKILL,
        **inside,
    ) -> Ended:
        """A run in folder/run with folder/config.py. kill_after: seconds behind its first step.

        inside: what happens within, see `inside.prepare`.
        """
        output = next(self._outputs)
        heard = Path(f"{output}.heard")
        argv = [str(ROOT / "scripts" / "train.py"), "--config=config.py", "--workdir=run"]
        asked = dict(
            output=str(output),
            folder=str(folder),
            argv=[*argv, *settings],
            inside=dict(heard=str(heard), **inside),
        )
        began = time.time()
        child = int(self._ask(asked))
        if kill_after is not None:
            descriptor = os.pidfd_open(child)
            _until(lambda: "first step" in _text(heard) or _is_over(descriptor))
            select.select([descriptor], [], [], kill_after)
            os.kill(child, signum)
            os.close(descriptor)
        status = int(self._ask(child))
        said = [json.loads(line) for line in _text(heard).splitlines() if line.endswith("]")]
        return Ended(
            os.waitstatus_to_exitcode(status),
            _text(output),
            [(seconds - began, line) for seconds, line in said],
            time.time() - began,
        )


def _is_over(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


def _until(holds) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.005)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
