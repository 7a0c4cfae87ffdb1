"""The environment that JAX and XLA read once, when the first device is used.

A user sets options of all programs with XLA_FLAGS; they win over those that jaxscale sets.
"""

import contextlib
import dataclasses
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxscale import warned
from jaxscale.xla import jaxlib

# The share of a GPU's memory that JAX takes.
MEMORY_FRACTION = "0.92"


@dataclasses.dataclass(frozen=True)
class Variable:
    """An environment variable that must be set before JAX starts; the user's value stays."""

    name: str
    value: str
    default: str
    why: str


def _host_gigabytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 10**9


VARIABLES = (
    Variable(
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
        MEMORY_FRACTION,
        default="0.75",
        why="the share of a GPU's memory that JAX takes; NCCL, cuDNN and the CUDA context need "
        "3 to 5 GB on H100",
    ),
    Variable(
        "NCCL_NVLS_ENABLE",
        "0",
        default="on where the hardware has it",
        why="no NVLink multicast: some shared machines forbid it, and no gain has been measured",
    ),
    Variable(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "1",
        default="8",
        why="launches start in the order in which they were issued: a matrix product that was "
        "issued after a collective does not take all multiprocessors before it; 0.6% of the step "
        "(Llama-3-8B, 4 x H200, jax 0.11.2)",
    ),
    Variable(
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB",
        str(max(64, _host_gigabytes())),
        default="64",
        why="all of the state of a process's GPUs passes through this memory when it is saved: 12 "
        "bytes a parameter, 96 GB for 8B in one process. It grows as it is needed",
    ),
)


@dataclasses.dataclass(frozen=True)
class Flag:
    """An option of all programs, which XLA takes from XLA_FLAGS alone; the user's value stays.

    option: its name as a compiler option, by which jaxlib says whether it has it. default: XLA's,
    the same in jaxlib 0.10.2 and 0.11.2.
    """

    name: str
    option: str
    value: str
    default: str
    why: str


# Seconds that no device has to wait for another: a day.
NEVER = "86400"
# XLA's own ends of what is stuck. In jaxlib 0.10.2 and 0.11.2 none else has a limit (that of NCCL
# and that of a whole execution are off) but the 1800 s of gloo's collectives.
WATCHED = (
    Flag(
        "xla_cpu_collective_call_terminate_timeout_seconds",
        option="xla_cpu_collective_call_terminate_timeout_seconds",
        value=NEVER,
        default="40, after a warning at 20",
        why="where a device of this process comes 60 s late to a collective XLA aborts and names "
        "nobody, also if it is only slow; the watchdog knows how long steps take, and who is stuck",
    ),
    Flag(
        "xla_gpu_executable_terminate_timeout",
        option="xla_gpu_executable_terminate_timeout_seconds",
        value=NEVER,
        default="30, after a warning at 10",
        why="where a GPU of this process starts a program so much later than the others XLA aborts "
        "and names nobody; the watchdog knows how long steps take, and who is stuck",
    ),
    Flag(
        "xla_gpu_first_collective_call_terminate_timeout_seconds",
        option="xla_gpu_first_collective_call_terminate_timeout_seconds",
        value=NEVER,
        default="40, after a warning at 20",
        why="where another host compiles or reads so much longer XLA aborts in the first "
        "collective; who does not come is told by the watchdog",
    ),
)


def leave_ends_to_the_watchdog() -> None:
    """Has XLA end no process whose devices wait for each other: for processes with a watchdog.

    Call after `set_environment`, before any device is used. Compiler options do not do: programs
    on CPUs read this limit from XLA_FLAGS alone, and agreements between processes have no options.
    """
    for flag in WATCHED:
        flags = os.environ.get("XLA_FLAGS", "").strip()
        is_file = bool(flags) and not flags.startswith("--")
        # jaxlib would abort on one that it has not.
        if not is_file and flag.option in jaxlib.known_names() and not has_flag(flag.name):
            os.environ["XLA_FLAGS"] = f"{flags} --{flag.name}={flag.value}".strip()


def set_environment() -> None:
    """Sets VARIABLES, and takes out of XLA_FLAGS what jaxlib would abort on.

    Call before any device is used. An unknown flag ends the process at XLA's start, in C++, so an
    old recipe in a job script would kill the run. What jaxlib says to XLA_FLAGS is asked in a
    process of its own (0.3 s, and only if there are any). Raises ValueError for a flag's value that
    XLA cannot read.
    """
    for variable in VARIABLES:
        os.environ.setdefault(variable.name, variable.value)
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags.startswith("--"):
        os.environ["XLA_FLAGS"] = _without_unknown(flags)
    # XLA takes anything else for the name of a file that holds flags.
    elif flags and not os.path.isfile(flags):
        raise ValueError(f"XLA_FLAGS={flags!r}: write --name=value, or the name of a file of flags")


def host_memory_gib() -> float:
    """What this process may take at most: of the machine, or of its cgroup and those above."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _cgroup_limits():
        with contextlib.suppress(OSError, ValueError):  # none there, or "max"
            limits.append(int(file.read_text()))
    return min(limits) / 2**30


def _cgroup_limits(proc: Path = Path("/proc/self/cgroup")) -> Iterator[Path]:
    """Files that may hold a limit. A line of `proc` is number:controllers:path, 0::path in v2."""
    root = Path("/sys/fs/cgroup")
    lines = proc.read_text().splitlines() if proc.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        base = root / "memory" if controllers else root
        if not controllers or "memory" in controllers.split(","):
            place = base / path.lstrip("/")
            yield from (up / name for up in (place, *place.parents) if up.is_relative_to(base))


def has_flag(name: str) -> bool:
    """Whether XLA_FLAGS set this option; a bool that is true needs no value there."""
    return bool(re.search(rf"(?<!\S)--{name}(?!\w)", os.environ.get("XLA_FLAGS", "")))


def lines(platform: str) -> Iterator[str]:
    """What differs from the defaults of JAX and XLA, a line each: value, default, why."""
    for variable in VARIABLES if platform == "gpu" else ():
        name, value = variable.name, os.environ.get(variable.name)
        if value == variable.value:
            yield f"environment: {name}={value} (default: {variable.default}): {variable.why}"
        elif value is not None:
            yield (
                f"environment: {name}={value}, set by the user; without, {variable.value}: "
                f"{variable.why}"
            )
    flags = os.environ.get("XLA_FLAGS", "")
    for flag in WATCHED:
        text = f"--{flag.name}={flag.value}"
        if text in flags.split() and flag.name.startswith(f"xla_{platform}_"):
            yield f"environment: XLA_FLAGS {text} (default: {flag.default}): {flag.why}"
        flags = flags.replace(text, "")
    if flags := flags.strip():
        yield f"environment: XLA_FLAGS={flags}, set by the user"


def _without_unknown(flags: str) -> str:
    """XLA_FLAGS without those that the installed jaxlib has not, each named in the log."""
    said = _said_to(flags)
    if wrong := re.search(r"Couldn't interpret value (.*) for flag (\w+)", said):
        raise ValueError(
            f"XLA_FLAGS: {wrong[1]!r} is not a value of --{wrong[2]}; correct it or take it out"
        )
    unknown = re.search(r"Unknown flags? in XLA_FLAGS: (.*)", said)
    for word in unknown[1].split() if unknown else ():
        if re.match(r"-\w", word):
            raise ValueError(f"XLA_FLAGS: {word!r} begins with one dash; write two")
    for name in re.findall(r"(?<!\S)--(\w+)", unknown[1]) if unknown else ():
        flags = re.sub(rf"""(?<!\S)--{name}(=("[^"]*"|'[^']*'|\S*))?(?!\S)""", "", flags)
        warned.once(
            f"XLA_FLAGS: {jaxlib.installed()} has no --{name}=...; it is ignored{jaxlib.hint(name)}"
        )
    return flags.strip()


# Without a core file of the process that aborts.
_READ_FLAGS = """
import resource
from jaxlib import xla_client

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
xla_client.CompileOptions()
"""


@functools.cache
def _said_to(flags: str) -> str:
    """What jaxlib writes when it reads these XLA_FLAGS; it aborts if it does not like them."""
    environment = os.environ | {"XLA_FLAGS": flags, "TF_CPP_MIN_LOG_LEVEL": "0"}
    # -P: nothing of the current folder is imported.
    return subprocess.run(
        [sys.executable, "-P", "-c", _READ_FLAGS], env=environment, capture_output=True, text=True
    ).stderr
