"""A SLURM of this machine: munged, slurmctld and a slurmd for each node, all on loopback.

Needs Debian's packages slurm-wlm and munge (`make test-slurm` installs them) and root. Its nodes
are called as loopback addresses, so that a job's first node is an address as it stands.
"""

import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
PATIENCE = 60

CONFIG = """
ClusterName=jaxscale
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2,requeue_delay=1
KillWait=15
MinJobAge=3600
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports} CPUs=2 RealMemory=4000
PartitionName=low Nodes={nodes} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes={nodes} PriorityTier=10 PreemptMode=OFF
"""


def reason_not_here() -> str | None:
    """Why no SLURM can be started here, or None."""
    if missing := [name for name in PROGRAMS if find(name) is None]:
        return f"{', '.join(missing)} not installed; `make test-slurm` installs slurm-wlm and munge"
    if os.geteuid() != 0:
        return "slurmd starts the processes of a job as root only"
    return None


def find(program: str) -> str | None:
    """Debian keeps daemons where a user's PATH does not look."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def free_ports(num: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(num)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class Cluster:
    """Context: a cluster of so many nodes, of two cores each."""

    def __init__(self, folder: Path, *, num_nodes: int):
        self.folder, self.nodes = folder, [f"127.0.0.{n}" for n in range(1, num_nodes + 1)]
        self._daemons: list[Path] = []
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith("SLURM_")
        } | {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> "Cluster":
        (self.folder / "state").mkdir()
        self._start_munge(self.folder / "munge")
        # slurmd takes one port for each node; a range in the file wants them side by side.
        control, *ports = free_ports(1 + len(self.nodes))
        (self.folder / "slurm.conf").write_text(
            CONFIG.format(
                folder=self.folder,
                host=socket.gethostname().split(".")[0],
                user=getpass.getuser(),
                control_port=control,
                nodes=f"127.0.0.[1-{len(self.nodes)}]",
                ports=f"[{','.join(map(str, sorted(ports)))}]",
            )
        )
        self._start("slurmctld", "-i", pid_file="slurmctld.pid")
        for node in self.nodes:
            (self.folder / f"spool.{node}").mkdir()
            self._start("slurmd", "-N", node, pid_file=f"slurmd.{node}.pid")
        self.wait_for(lambda: self.say("sinfo", "-h", "-o", "%T").split() == ["idle"], "idle nodes")
        return self

    def __exit__(self, *error):
        self.say("scancel", "--user", getpass.getuser(), check=False)
        for file in reversed(self._daemons):
            if file.exists():
                stop(int(file.read_text()))

    def _start_munge(self, folder: Path) -> None:
        """munged runs as a user of its own, in a folder that nobody else may write to."""
        folder.mkdir(mode=0o755)
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o400)
        for path in (folder / "key", folder):
            shutil.chown(path, "munge", "munge")
        files = {
            "key-file": "key",
            "socket": "munge.socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        options = [f"--{option}={folder / name}" for option, name in files.items()]
        self._start("munged", *options, pid_file="munge/pid", user="munge")

    def _start(self, program: str, *options: str, pid_file: str, user: str | None = None) -> None:
        path = find(program)
        assert path is not None
        done = subprocess.run(
            [path, *options], env=self.environment, user=user, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{program}: {done.stderr or done.stdout}"
        self._daemons.append(self.folder / pid_file)
        self.wait_for((self.folder / pid_file).exists, f"{program} to start")

    def wait_for(self, holds, what: str, *, seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}\n{self.logs()}"
            time.sleep(0.1)

    def say(self, program: str, *words: object, check: bool = True, **environment: str) -> str:
        """What a command of SLURM prints."""
        path = find(program)
        assert path is not None
        done = subprocess.run(
            [path, *map(str, words)],
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert not check or done.returncode == 0, f"{program}: {done.stderr}"
        return done.stdout

    def state(self, job: int) -> dict[str, str]:
        """What SLURM knows of a job: JobState, Restarts, ExitCode, ..."""
        text = self.say("scontrol", "--oneliner", "show", "job", job)
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def logs(self) -> str:
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )


def stop(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 10
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
