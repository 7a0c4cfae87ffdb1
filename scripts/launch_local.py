"""Starts the processes of one run on this machine.

python scripts/launch_local.py -n 4 -- scripts/train.py --config configs/tiny.py --workdir runs/x

With GPUs, each process has its share of them; without, each is a process of CPU devices that talks
to the others by gloo. What they print is shown behind their numbers. If one fails, it is named with
its exit code and its last lines, the others are ended, and its exit code is the launcher's. SIGINT,
SIGTERM and the like go to all of them.
"""

import argparse
import collections
import contextlib
import ctypes
import os
import queue
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from jaxscale.launch import EXIT_AGAIN, num_gpus

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# What the others have to end by themselves, as they do once they notice; then to end when told.
GRACE_SECONDS, TOLD_SECONDS = 5.0, 2.0
NUM_LAST_LINES = 20
PR_SET_PDEATHSIG = 1


def main() -> int:
    arguments = parse()
    try:
        environments = environments_of(arguments.n, arguments.cpu_devices)
        processes = Processes(arguments.command, environments)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    # Before anything is printed: who reads that a process is ready may send a signal.
    for signum in FORWARDED:
        signal.signal(signum, lambda number, frame: processes.send(number))
    with processes:
        return processes.wait()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, required=True, help="the number of processes")
    parser.add_argument(
        "--cpu-devices", type=int, default=1, help="CPU devices of each process, without GPUs"
    )
    parser.add_argument("command", nargs="+", help="after --: a script of Python, or a program")
    arguments, unknown = parser.parse_known_args()
    if unknown:
        parser.error(
            f"{unknown[0]}: write -- in front of the command, as in -n 2 -- scripts/train.py"
        )
    if arguments.n < 1 or arguments.cpu_devices < 1:
        parser.error("-n and --cpu-devices are 1 or more")
    if arguments.command[0].endswith(".py"):
        if not Path(arguments.command[0]).is_file():
            parser.error(f"{arguments.command[0]}: no such file; name a script")
        arguments.command = [sys.executable, "-u", *arguments.command]
    return arguments


def environments_of(num: int, cpu_devices: int) -> list[dict[str, str]]:
    """What each process gets to know. Raises ValueError if the GPUs cannot be divided."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    shared = dict(os.environ)
    # They are no tasks of a batch job that this may run in, and nobody else's processes.
    for name in ("SLURM_STEP_ID", "OMPI_COMM_WORLD_SIZE", "JOB_COMPLETION_INDEX"):
        shared.pop(name, None)
    words = shlex.join([Path(sys.executable).name, *sys.argv])
    shared |= {
        "JAXSCALE_COORDINATOR": f"127.0.0.1:{port}",
        "JAXSCALE_NUM_PROCESSES": str(num),
        # What a message tells the user to run again.
        "JAXSCALE_COMMAND": f"cd {shlex.quote(os.getcwd())} && {words}",
    }
    gpus = [] if os.environ.get("JAX_PLATFORMS") == "cpu" else names_of_gpus()
    if not gpus:
        flag = f"--xla_force_host_platform_device_count={cpu_devices}"
        shared |= {
            "JAX_PLATFORMS": "cpu",
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            # XLA takes the last of two equal flags.
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip(),
        }
    elif len(gpus) % num:
        raise ValueError(
            f"-n {num}: the {len(gpus)} GPUs here cannot be divided alike; set -n to a divisor, "
            "CUDA_VISIBLE_DEVICES to fewer of them, or JAX_PLATFORMS=cpu"
        )
    environments = [shared | {"JAXSCALE_PROCESS_ID": str(number)} for number in range(num)]
    share = len(gpus) // num
    for number, environment in enumerate(environments if gpus else []):
        mine = gpus[number * share : (number + 1) * share]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
    return environments


def names_of_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES has them."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return [name.strip() for name in visible.split(",")][: num_gpus()]
    return [str(number) for number in range(num_gpus())]


class Processes:
    """Context: the processes, each in a session of its own, so that Ctrl-C comes from here alone.

    They end with the launcher, also if it is killed.
    """

    def __init__(self, command: list[str], environments: list[dict[str, str]]):
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._is_told = self._has_ended_others = False
        self._printing = threading.Lock()
        self._last = [collections.deque(maxlen=NUM_LAST_LINES) for _ in environments]
        libc = ctypes.CDLL(None)
        try:
            self._processes = [
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    # No thread of this process runs yet that could hold a lock.
                    preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
                )
                for environment in environments
            ]
        except OSError as error:
            raise ValueError(f"{command[0]} cannot be started: {error.strerror}") from None
        self._readers = [
            threading.Thread(target=self._read, args=[number], daemon=True)
            for number in range(len(environments))
        ]

    def __enter__(self) -> "Processes":
        for number, reader in enumerate(self._readers):
            reader.start()
            threading.Thread(target=self._watch, args=[number], daemon=True).start()
        return self

    def __exit__(self, *error):
        self._end(range(len(self._processes)), signal.SIGKILL)

    def _read(self, number: int) -> None:
        stream = self._processes[number].stdout
        assert stream is not None
        for line in stream:
            text = line.decode(errors="replace").rstrip("\n")
            self._last[number].append(text)
            self._print(f"[{number}] {text}")

    def _print(self, text: str) -> None:
        with self._printing, contextlib.suppress(OSError):
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

    def _watch(self, number: int) -> None:
        self._processes[number].wait()
        self._ended.put(number)

    def send(self, signum: int) -> None:
        self._is_told = True
        self._end(range(len(self._processes)), signum)

    def _end(self, numbers, signum: int) -> None:
        for number in numbers:
            if self._processes[number].poll() is None:
                self._processes[number].send_signal(signum)

    def wait(self) -> int:
        """The exit code of the first that failed, and 0 if none did."""
        left, failed = set(range(len(self._processes))), list[int]()
        deadline = None
        while left:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                number = self._ended.get(timeout=timeout)
            except queue.Empty:
                self._end_others(left)
                deadline = None
                continue
            left.remove(number)
            if self._processes[number].returncode and not self._has_ended_others:
                failed.append(number)
                deadline = deadline or time.monotonic() + GRACE_SECONDS
        for reader in self._readers:
            reader.join(1.0)  # a child of theirs may hold the pipe
        if not failed:
            return 0
        # A process that leaves because another has vanished can be gone before the kernel has taken
        # all of that one down. JAX aborts who outlives the others.
        follows = (EXIT_AGAIN, 128 + signal.SIGABRT)
        first = min(failed, key=lambda number: self._code(number) in follows)
        self._tell(first)
        return self._code(first)

    def _code(self, number: int) -> int:
        """As a shell has it."""
        returned = self._processes[number].returncode
        return returned if returned >= 0 else 128 - returned

    def _end_others(self, left: set[int]) -> None:
        self._has_ended_others = True
        for number in sorted(left):
            state = "it is stopped" if self._is_stopped(number) else "it has not noticed"
            self._print(f"launch_local: ending process {number}: {state}")
        self._end(left, signal.SIGTERM)
        time.sleep(TOLD_SECONDS)
        self._end(left, signal.SIGKILL)

    def _is_stopped(self, number: int) -> bool:
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{self._processes[number].pid}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] == "T"
        return False

    def _tell(self, number: int) -> None:
        code = self._processes[number].returncode
        if self._is_told and self._code(number) in (EXIT_AGAIN, 128 + signal.SIGINT):
            return
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )
        self._print(f"launch_local: process {number} {how}, the first to fail; its last lines:")
        for text in self._last[number]:
            self._print(f"launch_local: [{number}] {text}")


if __name__ == "__main__":
    sys.exit(main())
