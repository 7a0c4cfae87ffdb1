"""How the processes of a run were started, as the environment says; and what each has of its host.

SLURM, Open MPI, an indexed job of Kubernetes, or explicit variables, which win one by one. Nothing
here imports jax: a process binds itself to its cores before a library starts threads.
"""

import dataclasses
import os
import re
import subprocess
import zlib
from collections.abc import Mapping
from pathlib import Path

# What a process ends with when the same command, run again, goes on: it was told to stop and has
# saved, or another process of its run was lost. EX_TEMPFAIL of sysexits.h; scripts/train.slurm
# requeues the job, scripts/k8s restarts it.
EXIT_AGAIN = 75
# A device was found to corrupt what it holds or computes: the same command would go on, on other
# hosts. Nothing starts it again by itself.
EXIT_CORRUPT = 76

# The launcher of a process that has variables alone.
EXPLICIT = "explicit variables"
COORDINATOR = ("JAXSCALE_COORDINATOR", "JAX_COORDINATOR_ADDRESS")
NUM_PROCESSES = ("JAXSCALE_NUM_PROCESSES", "JAX_NUM_PROCESSES")
PROCESS_ID = ("JAXSCALE_PROCESS_ID", "JAX_PROCESS_ID")
PORT = ("JAXSCALE_COORDINATOR_PORT", "JAX_COORDINATOR_PORT")
# Where the coordinator listens if nobody names a port: above the ports that Linux gives to outgoing
# connections (32768 to 60999), so none of those has it.
FIRST_PORT, NUM_PORTS = 61000, 4000


@dataclasses.dataclass(frozen=True)
class Launch:
    """A process among those of its run.

    key: the variable that says where the coordinator is, for messages. local: this process among
    the `num_local` of its host, where the launcher says so.
    """

    launcher: str
    host: str
    port: int
    num_processes: int
    process: int
    key: str
    local: int | None = None
    num_local: int | None = None

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether the coordinator is for processes of this host alone."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


@dataclasses.dataclass(frozen=True)
class _Found:
    """What a launcher says; None where it leaves that to the user."""

    launcher: str
    num_processes: int | None = None
    process: int | None = None
    host: str | None = None
    # Differs between jobs that may share a host.
    number: int = 0
    local: int | None = None
    num_local: int | None = None


def detect(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """This process among those of its run; None if it is the whole run.

    `JAXSCALE_COORDINATOR`, `JAXSCALE_NUM_PROCESSES` and `JAXSCALE_PROCESS_ID` (or jax's own
    `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID`) win over what a launcher says.
    Raises ValueError for a variable that cannot be, or one that is missing beside the others.
    """
    explicit = [name for key in (COORDINATOR, NUM_PROCESSES, PROCESS_ID) for name in key]
    named = [name for name in explicit if environ.get(name)]
    # Open MPI first: its own daemons are tasks of a SLURM step where mpirun runs in a SLURM job.
    found = _open_mpi(environ) or _slurm(environ) or _kubernetes(environ)
    if not named and (found is None or found.num_processes is None):
        return None
    found = found or _Found(EXPLICIT)
    num = _whole_number(environ, NUM_PROCESSES, default=found.num_processes, named=named)
    process = _whole_number(environ, PROCESS_ID, default=found.process, named=named)
    if num < 1:
        raise ValueError(f"{_name(environ, NUM_PROCESSES)}={num} must be 1 or more")
    if process >= num:
        raise ValueError(
            f"{_name(environ, PROCESS_ID)}={process} must be below "
            f"{_name(environ, NUM_PROCESSES)}={num}: they count from 0"
            + f" (what is not set is as {found.launcher} has it)"
            * (found.launcher != EXPLICIT)
        )
    if num == 1:
        return None
    host, port = _coordinator(environ, found, named=named)
    return Launch(
        launcher=found.launcher,
        host=host,
        port=port,
        num_processes=num,
        process=process,
        key=_name(environ, COORDINATOR),
        local=found.local,
        num_local=found.num_local,
    )


def _slurm(environ: Mapping[str, str]) -> _Found | None:
    """A task of a job step; in an allocation without one a process is alone."""
    num = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "1")
    if "SLURM_STEP_ID" not in environ or num == "1":
        return None
    job, step, restart = (
        _number(environ, f"SLURM_{what}", default="0")
        for what in ("JOB_ID", "STEP_ID", "RESTART_COUNT")
    )
    return _Found(
        "SLURM",
        num_processes=_number(environ, "SLURM_STEP_NUM_TASKS", default=num),
        process=_number(environ, "SLURM_PROCID"),
        host=first_host(environ.get("SLURM_STEP_NODELIST", "")),
        # With the restarts, a job that comes back does not meet what is left of its former self.
        number=job * 7 + step + restart,
        local=_number(environ, "SLURM_LOCALID", default="0"),
        num_local=_tasks_here(environ),
    )


def _tasks_here(environ: Mapping[str, str]) -> int | None:
    """`2(x3),1`: two tasks on each of three nodes, one on the fourth."""
    tasks: list[int] = []
    for text in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", text):
            tasks += [int(match[1])] * int(match[2] or 1)
    node = _number(environ, "SLURM_NODEID", default="0")
    return tasks[node] if node < len(tasks) else None


def first_host(nodes: str) -> str | None:
    """Of a list as SLURM writes it, such as `gpu[07-12,20]-ib,login1`: gpu07-ib."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0]) if first else None


def _open_mpi(environ: Mapping[str, str]) -> _Found | None:
    """A process of mpirun.

    Release 4 says where mpirun runs, which is where process 0 is unless it was started from a login
    node; release 5 does not, so with several hosts the user names the coordinator.
    """
    if environ.get("OMPI_COMM_WORLD_SIZE", "1") == "1":
        return None
    num = _number(environ, "OMPI_COMM_WORLD_SIZE")
    num_local = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", default="0") or None
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    host = None
    if num_local == num:
        host = "127.0.0.1"
    elif match := re.search(r"tcp6?://\[?([^,;\]]+?)(?:[,\]]|:\d+(?:;|$))", uri):
        host = match[1]
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or uri
    return _Found(
        "Open MPI",
        num_processes=num,
        process=_number(environ, "OMPI_COMM_WORLD_RANK"),
        host=host,
        number=zlib.crc32(job.encode()),
        local=_number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", default="0"),
        num_local=num_local,
    )


def _kubernetes(environ: Mapping[str, str]) -> _Found | None:
    """A pod of an indexed job. Kubernetes says its index alone; the manifest says the rest.

    Without the rest it is a run of its own: the indices may be those of a sweep.
    """
    if not environ.get("JOB_COMPLETION_INDEX"):
        return None
    return _Found("Kubernetes", process=_number(environ, "JOB_COMPLETION_INDEX"))


def _coordinator(environ: Mapping[str, str], found: _Found, *, named: list[str]) -> tuple[str, int]:
    """Host and port. Raises ValueError for an address that has none."""
    key = _name(environ, COORDINATOR)
    address = environ.get(key, "")
    if not address:
        if found.host is None:
            raise ValueError(_missing(COORDINATOR, named, launcher=found.launcher))
        port = FIRST_PORT + found.number % NUM_PORTS
        port = _whole_number(environ, PORT, default=port, named=named)
        if not 0 < port < 2**16:
            raise ValueError(f"{_name(environ, PORT)}={port}: write a port from 1 to 65535")
        return found.host, port
    host, _, port_text = address.rpartition(":")
    host = host.strip("[]")
    if not host or not (port_text.isascii() and port_text.isdigit() and 0 < int(port_text) < 2**16):
        raise ValueError(
            f"{key}={address!r}: write host:port, the port from 1 to 65535, such as node0:29500"
        )
    return host, int(port_text)


def _name(environ: Mapping[str, str], names: tuple[str, str]) -> str:
    """The one of both that is set; ours if none is."""
    return next((name for name in names if environ.get(name)), names[0])


def _whole_number(
    environ: Mapping[str, str], names: tuple[str, str], *, default: int | None, named: list[str]
) -> int:
    name = _name(environ, names)
    if environ.get(name):
        return _number(environ, name)
    if default is None:
        raise ValueError(_missing(names, named))
    return default


def _missing(names: tuple[str, str], named: list[str], *, launcher: str = "") -> str:
    is_jax = bool(named) and all(name.startswith("JAX_") for name in named)
    name = names[1] if is_jax else names[0]
    beside = f"{', '.join(named)} is" if named else f"{launcher} started this process"
    return (
        f"{name} is not set, and {beside}: set {name} on every process "
        "(docs/clusters.md has the variables of each launcher)"
    )


def _number(environ: Mapping[str, str], name: str, *, default: str = "") -> int:
    value = environ.get(name, default)
    if not (value.isascii() and value.isdigit()):
        raise ValueError(f"{name}={value!r} must be a whole number, 0 or more")
    return int(value)


def seconds_of(name: str, default: int) -> int:
    """A duration that the environment may change. Raises ValueError."""
    seconds = _number(os.environ, name, default=str(default))
    if seconds < 1:
        raise ValueError(f"{name}={seconds} must be 1 or more")
    return seconds


# What a process has of its host.


def gpus_of(launch: Launch, environ: Mapping[str, str] = os.environ) -> list[int] | None:
    """Which of the GPUs that it sees are this process's, if the processes of its host share them.

    None: all that it sees. A launcher that gives each process GPUs of its own has done the
    division; scripts/train.slurm does not ask for that, as NCCL could not use NVLink between
    processes whose cgroups hide each other's GPUs. Raises ValueError if they cannot be divided.
    """
    num_local, local = launch.num_local, launch.local
    is_divided = any(environ.get(f"SLURM_GPUS_PER_{what}") for what in ("TASK", "TASKS"))
    if num_local in (None, 1) or local is None or is_divided or _is_for_cpus(environ):
        return None
    num = num_gpus(environ)
    if num == 0 or (num < num_local and environ.get("CUDA_VISIBLE_DEVICES")):
        return None
    if num % num_local:
        raise ValueError(
            f"{num_local} processes cannot share the {num} GPUs of this host alike: start as many "
            "processes on a host as it has GPUs, or one"
        )
    share = num // num_local
    return list(range(local * share, (local + 1) * share))


def _is_for_cpus(environ: Mapping[str, str]) -> bool:
    return environ.get("JAX_PLATFORMS") == "cpu"


def num_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """The NVIDIA GPUs that this process may see."""
    if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len([path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()])


def bind_to_numa_node(gpus: list[int] | None) -> str | None:
    """Keeps this process, and threads that it starts later, on the cores beside its GPUs.

    gpus: which of those that it sees; None: all. Memory that such a thread touches first lies there
    as well. Call before libraries start threads. Returns what it did, or None where there is
    nothing to choose: no GPU, GPUs on several nodes, or `JAXSCALE_NUMA=0`.
    """
    if os.environ.get("JAXSCALE_NUMA") == "0" or _is_for_cpus(os.environ) or not num_gpus():
        return None
    nodes = {_numa_node(address) for address in _pci_addresses(gpus)}
    if len(nodes) != 1 or (node := nodes.pop()) is None:
        return None
    file = Path(f"/sys/devices/system/node/node{node}/cpulist")
    allowed = os.sched_getaffinity(0)
    cores = _cores(file.read_text()) & allowed if file.exists() else set()
    if not cores or cores == allowed:
        return None
    os.sched_setaffinity(0, cores)
    return f"on the {len(cores)} cores of NUMA node {node}, beside its GPUs"


def _pci_addresses(gpus: list[int] | None) -> list[str]:
    """Of the GPUs that this process sees, in CUDA's order, or of some of them."""
    command = ["nvidia-smi", "--query-gpu=uuid,pci.bus_id", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(", ") for line in said.stdout.splitlines() if ", " in line]
    addresses = {str(number): address for number, (_, address) in enumerate(rows)}
    addresses |= dict(rows)
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(rows)))))
    seen = [addresses[name] for name in names.split(",") if name in addresses]
    return seen if gpus is None else [seen[gpu] for gpu in gpus if gpu < len(seen)]


def _numa_node(address: str) -> int | None:
    """address: as nvidia-smi writes it, with a domain of eight digits where the kernel has four."""
    file = Path(f"/sys/bus/pci/devices/{address.strip()[-12:].lower()}/numa_node")
    node = int(file.read_text()) if file.exists() else -1
    return node if node >= 0 else None


def _cores(text: str) -> set[int]:
    """`0-3,8` as the kernel lists cores."""
    ranges = (part.split("-") for part in text.strip().split(",") if part)
    return {core for ends in ranges for core in range(int(ends[0]), int(ends[-1]) + 1)}
