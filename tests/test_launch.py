"""What the environment of each launcher says, and what a process has of its host."""

import os
from pathlib import Path

import pytest
import yaml  # of ml_collections

from jaxscale import launch
from jaxscale.command_line import EXIT_INTERRUPTED, EXIT_MISTAKE
from jaxscale.launch import detect, first_host, gpus_of

STEP = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[07-09,20]-ib",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
JAX = {
    "JAX_COORDINATOR_ADDRESS": "node0:1",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
}
OURS = {
    "JAXSCALE_COORDINATOR": "node1:2",
    "JAXSCALE_NUM_PROCESSES": "2",
    "JAXSCALE_PROCESS_ID": "1",
}


def launch_of(environ):
    found = detect(environ)
    assert found is not None
    return found


def what(environ):
    found = launch_of(environ)
    return found.launcher, found.host, found.num_processes, found.process


ALONE = {
    "nothing": {},
    "an allocation without a step": {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"},
    "a step of one task": STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"},
    "mpirun of one": {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    "one of a sweep's indices": {"JOB_COMPLETION_INDEX": "3"},
    "one by name": OURS | {"JAXSCALE_NUM_PROCESSES": "1", "JAXSCALE_PROCESS_ID": "0"},
}


@pytest.mark.parametrize("case", ALONE)
def test_a_process_is_alone(case):
    assert detect(ALONE[case]) is None


def test_a_task_of_slurm_finds_the_first_host_of_its_step_and_its_place_on_its_own():
    assert what(STEP) == ("SLURM", "gpu07-ib", 7, 3)
    found = launch_of(STEP)
    assert (found.local, found.num_local) == (1, 2)
    assert launch_of(STEP | {"SLURM_NODEID": "3"}).num_local == 1


def test_two_jobs_two_steps_and_two_starts_of_a_job_have_ports_of_their_own():
    others = ({"SLURM_JOB_ID": "4243"}, {"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "2"})
    ports = [launch_of(STEP | change).port for change in ({}, *others)]
    assert len(set(ports)) == len(ports)
    # Above those that Linux takes for outgoing connections.
    assert all(61000 <= port < 65536 for port in ports)
    assert launch_of(STEP | {"JAXSCALE_COORDINATOR_PORT": "123"}).address == "gpu07-ib:123"
    assert launch_of(STEP | {"JAX_COORDINATOR_PORT": "124"}).port == 124


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-3]", "n1"),
        ("n[001,007-015],m", "n001"),
        ("r[1-2]n[3-4]-ib,x", "r1n3-ib"),
        ("127.0.0.[1-2]", "127.0.0.1"),
        ("", None),
    ],
)
def test_the_first_host_of_a_list_of_slurm(nodes, first):
    assert first_host(nodes) == first


def test_a_process_of_open_mpi_finds_the_host_of_mpirun_and_on_one_host_needs_none():
    assert what(MPI) == ("Open MPI", "10.96.0.1", 4, 3)
    tcp6 = MPI | {"OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp6://[fe80::b9b,2620:10d::2]:43370"}
    assert launch_of(tcp6).address == f"[fe80::b9b]:{launch_of(tcp6).port}"
    both = MPI | {"OMPI_MCA_orte_hnp_uri": "13.0;tcp://192.0.2.2:38987;tcp6://[fd00::2]:58021"}
    assert launch_of(both).host == "192.0.2.2"
    here = MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun-a-1@1"}
    del here["OMPI_MCA_orte_hnp_uri"]  # release 5 has none
    assert launch_of(here).host == "127.0.0.1" and launch_of(here).is_loopback
    assert launch_of(here).port != launch_of(here | {"PMIX_NAMESPACE": "prterun-a-2@1"}).port


def test_mpirun_inside_a_slurm_job_counts_its_own_processes():
    assert what(STEP | MPI)[0] == "Open MPI"


def test_a_pod_of_an_indexed_job_has_its_number_and_the_manifest_says_the_rest():
    pod = {"JOB_COMPLETION_INDEX": "2", **OURS, "JAXSCALE_NUM_PROCESSES": "4"}
    del pod["JAXSCALE_PROCESS_ID"]
    assert what(pod) == ("Kubernetes", "node1", 4, 2)


def test_jaxs_own_names_do_and_ours_win_one_by_one_over_a_launcher_too():
    assert what(JAX) == (launch.EXPLICIT, "node0", 4, 3)
    assert what(JAX | OURS) == (launch.EXPLICIT, "node1", 2, 1)
    assert what(STEP | {"JAXSCALE_COORDINATOR": "10.0.0.1:5"}) == ("SLURM", "10.0.0.1", 7, 3)
    assert launch_of(OURS | {"JAXSCALE_COORDINATOR": "[::1]:5"}).address == "[::1]:5"


# A change of the variables of four processes -> what is told.
MISTAKES = {
    "no port": ({"JAX_COORDINATOR_ADDRESS": "n"}, "JAX_COORDINATOR_ADDRESS='n': write host:port"),
    "wrong port": ({"JAX_COORDINATOR_ADDRESS": "n:x"}, "'n:x': write host:port"),
    "high port": ({"JAX_COORDINATOR_ADDRESS": "n:70000"}, "the port from 1 to 65535"),
    "our name": ({"JAXSCALE_COORDINATOR": "n"}, "JAXSCALE_COORDINATOR='n': write host:port"),
    "beyond": ({"JAX_PROCESS_ID": "4"}, "JAX_PROCESS_ID=4 must be below JAX_NUM_PROCESSES=4"),
    "negative": ({"JAX_PROCESS_ID": "-1"}, "JAX_PROCESS_ID='-1' must be a whole number"),
    "none": ({"JAX_NUM_PROCESSES": "0"}, "JAX_NUM_PROCESSES=0 must be 1 or more"),
    "no number": ({"JAX_PROCESS_ID": ""}, "JAX_PROCESS_ID is not set, and JAX_COORDINATOR_ADDRESS"),
    "no address": (
        {"JAX_COORDINATOR_ADDRESS": ""},
        "JAX_COORDINATOR_ADDRESS is not set, and JAX_N",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_told_with_the_variable_the_value_and_the_fix(case):
    change, told = MISTAKES[case]
    with pytest.raises(ValueError, match=told):
        launch_of(JAX | change)


def test_the_manifest_of_kubernetes_says_what_its_pods_need():
    manifest = Path(__file__).parents[1] / "scripts" / "k8s" / "train.yaml"
    service, job = yaml.safe_load_all(manifest.read_text())
    pod, name = job["spec"]["template"]["spec"], job["metadata"]["name"]
    (container,) = pod["containers"]
    environ = {entry["name"]: entry["value"] for entry in container["env"]}
    num = job["spec"]["completions"]
    assert job["spec"]["parallelism"] == num and job["spec"]["completionMode"] == "Indexed"
    # The name of a pod of an indexed job, in the domain of the service that selects it.
    assert pod["subdomain"] == service["metadata"]["name"]
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    for index in range(num):
        found = what(environ | {"JOB_COMPLETION_INDEX": str(index)})
        assert found == ("Kubernetes", f"{name}-0.{pod['subdomain']}", num, index)
    # Its rules know our exit codes.
    codes = {
        rule["action"]: rule["onExitCodes"]["values"]
        for rule in job["spec"]["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert codes == {
        "FailJob": [EXIT_MISTAKE, launch.EXIT_CORRUPT],
        "Ignore": [launch.EXIT_AGAIN],
    }


def test_the_batch_script_knows_our_exit_codes():
    text = (Path(__file__).parents[1] / "scripts" / "train.slurm").read_text()
    codes = f"exit_mistake={EXIT_MISTAKE} exit_again={launch.EXIT_AGAIN} "
    codes += f"exit_corrupt={launch.EXIT_CORRUPT} "
    assert f"readonly {codes}exit_interrupted={EXIT_INTERRUPTED}" in text


def test_what_a_launcher_cannot_say_is_asked_of_the_user():
    pod = {"JOB_COMPLETION_INDEX": "2", "JAXSCALE_NUM_PROCESSES": "4"}
    with pytest.raises(ValueError, match="JAXSCALE_COORDINATOR is not set, and JAXSCALE_NUM_P"):
        launch_of(pod)
    two_hosts = {name: value for name, value in MPI.items() if "uri" not in name}
    with pytest.raises(ValueError, match="JAXSCALE_COORDINATOR is not set, and Open MPI started"):
        launch_of(two_hosts)
    with pytest.raises(ValueError, match="SLURM_PROCID='' must be a whole number"):
        launch_of({name: value for name, value in STEP.items() if name != "SLURM_PROCID"})


# GPUs that a process sees, and what else is set -> its share, the second of two on its host.
SHARES = {
    "eight": ("0,1,2,3,4,5,6,7", {}, [4, 5, 6, 7]),
    "two": ("3,5", {}, [1]),
    "names": ("GPU-a,GPU-b", {}, [1]),
    "one that it was given": ("5", {}, None),
    "two that it was given": ("0,1", {"SLURM_GPUS_PER_TASK": "2"}, None),
    "none": ("", {}, None),
    "hidden": ("-1", {}, None),
    "for CPUs": ("0,1", {"JAX_PLATFORMS": "cpu"}, None),
}


@pytest.mark.parametrize("case", SHARES)
def test_processes_of_a_host_share_the_gpus_that_all_of_them_see(case):
    visible, change, share = SHARES[case]
    assert gpus_of(launch_of(STEP), {"CUDA_VISIBLE_DEVICES": visible} | change) == share


def test_gpus_that_cannot_be_divided_are_told():
    with pytest.raises(ValueError, match="2 processes cannot share the 3 GPUs of this host"):
        gpus_of(launch_of(STEP), {"CUDA_VISIBLE_DEVICES": "0,1,2"})


@pytest.fixture
def two_nodes(tmp_path, monkeypatch):
    """A host of two NUMA nodes with two GPUs on each; what the process was bound to."""
    rows = [f"GPU-{n}, 00000000:{n}B:00.0" for n in range(4)]
    monkeypatch.setattr(
        launch.subprocess,
        "run",
        lambda *words, **options: type("Done", (), {"stdout": "\n".join(rows)}),
    )
    files = {f"/sys/bus/pci/devices/0000:{n}b:00.0/numa_node": str(n // 2) for n in range(4)}
    files |= {f"/sys/devices/system/node/node{n}/cpulist": f"{4 * n}-{4 * n + 3}" for n in (0, 1)}
    for name, text in files.items():
        (tmp_path / name[1:]).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name[1:]).write_text(text)
    monkeypatch.setattr(launch, "Path", lambda name: tmp_path / name.lstrip("/"))
    bound: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(1, 8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(cores))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("JAXSCALE_NUMA", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    return bound


def test_a_process_is_bound_to_the_cores_beside_its_gpus(two_nodes, monkeypatch):
    assert launch.bind_to_numa_node([1]) == "on the 3 cores of NUMA node 0, beside its GPUs"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-2,3")
    assert launch.bind_to_numa_node(None) == "on the 4 cores of NUMA node 1, beside its GPUs"
    assert two_nodes == [{1, 2, 3}, {4, 5, 6, 7}]


def test_a_process_with_gpus_on_both_nodes_or_told_not_to_is_not_bound(two_nodes, monkeypatch):
    assert launch.bind_to_numa_node(None) is None
    monkeypatch.setenv("JAXSCALE_NUMA", "0")
    assert launch.bind_to_numa_node([1]) is None
    assert two_nodes == []
