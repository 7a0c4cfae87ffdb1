"""Processes join as the environment says, and what they agree on is the same on each of them."""

import os
import socket
import subprocess
import sys

import jax
import pytest

from jaxscale import distributed

AGREEMENTS = """
    from jaxscale import distributed
    from jaxscale import sharding as shd

    def agree():
        assert distributed.is_lead() == (index == 0)
        values = [(1.5, float("-inf"), 3.0), (0.5, 2.0, float("inf"))][index]
        assert distributed.largest(values) == [1.5, 2.0, float("inf")]
        steps = list(range(2**31 - 2000, 2**31 - 1))
        assert distributed.lead_says([steps, []][index]) == steps
        assert distributed.lead_says([[], [7]][index]) == []
        assert distributed.lead_says([[-1, 0], [5, 6, 7]][index]) == [-1, 0]
        texts = ["", "step 3 is damaged: schön" * 100]
        assert distributed.every_process_says(texts[index]) == texts
        assert distributed.every_process_says("") == ["", ""]

    def vote():
        # The votes of either process, one call late.
        wishes = iter([[1, 0, 0, 0, 0], [0, 0, 1, 0, 0]][index])
        stops = distributed.any_process(lambda: bool(next(wishes)))
        assert [stops() for _ in range(5)] == [False, True, False, True, False]

    agree()
    vote()
    # A run's own mesh may have its devices in another order, and its axes explicit.
    for axis_types in ("explicit", "auto"):
        mesh = shd.make_mesh({"data": 4}, devices=jax.devices()[::-1], axis_types=axis_types)
        with shd.use(mesh, shd.Rules(batch="data")):
            agree()
            vote()
    print("process", index, "done")
"""


def test_two_processes_agree_inside_a_mesh_and_outside(run_two_processes):
    for index, output in enumerate(run_two_processes(AGREEMENTS)):
        assert f"process {index} done" in output, output


def test_a_run_of_one_process_agrees_with_itself():
    assert distributed.is_lead()
    assert distributed.largest([0.1, float("inf")]) == [0.1, float("inf")]
    assert distributed.lead_says([3, -1]) == [3, -1]
    assert distributed.every_process_says("a") == ["a"]
    wishes = iter([False, True, False])
    stops = distributed.any_process(lambda: next(wishes))
    assert [stops() for _ in range(3)] == [False, True, False]  # at once, not a call late


@pytest.fixture
def joined(monkeypatch):
    """What jax.distributed.initialize was called with; the environment names no other process."""
    calls: list[dict] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **options: calls.append(options))
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "JAXSCALE_", "JAX_COORDINATOR", "JOB_COMPLETION")):
            monkeypatch.delenv(name)
    return calls


def test_a_process_that_is_alone_joins_nobody(joined, monkeypatch):
    distributed.initialize()
    monkeypatch.setenv("SLURM_NTASKS", "8")  # an allocation, but no job step of it
    distributed.initialize()
    assert joined == []


def test_a_process_joins_as_the_environment_says_with_a_heartbeat(joined, monkeypatch):
    set_jax(monkeypatch, COORDINATOR_ADDRESS="localhost:1", NUM_PROCESSES="4", PROCESS_ID="3")
    distributed.initialize()
    (options,) = joined
    assert (options["num_processes"], options["process_id"]) == (4, 3)
    assert options["coordinator_address"] == options["coordinator_bind_address"] == "localhost:1"
    assert options["heartbeat_timeout_seconds"] == distributed.HEARTBEAT_SECONDS
    assert options["initialization_timeout"] == 2 * distributed.JOIN_SECONDS
    monkeypatch.setenv("JAXSCALE_HEARTBEAT_SECONDS", "30")
    distributed.initialize()
    assert joined[1]["heartbeat_timeout_seconds"] == 30


def set_jax(monkeypatch, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(f"JAX_{name}", value)


# JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID of four processes -> what is told.
WRONG_PLACES = {
    ("node0", "1"): "JAX_COORDINATOR_ADDRESS='node0': write host:port",
    ("localhost:port", "1"): "JAX_COORDINATOR_ADDRESS='localhost:port': write host:port",
    ("localhost:70000", "1"): "the port from 1 to 65535",
    ("nowhere.invalid:29500", "1"): "host 'nowhere.invalid' is not known here",
    ("localhost:29500", "4"): "JAX_PROCESS_ID=4 must be below JAX_NUM_PROCESSES=4",
    ("localhost:29500", "-1"): "JAX_PROCESS_ID='-1' must be a whole number",
}


@pytest.mark.parametrize("place", WRONG_PLACES)
def test_a_place_where_nobody_can_be_joined_is_told_at_once(joined, monkeypatch, place):
    set_jax(monkeypatch, COORDINATOR_ADDRESS=place[0], NUM_PROCESSES="4", PROCESS_ID=place[1])
    with pytest.raises(ValueError, match=WRONG_PLACES[place]):
        distributed.initialize()
    assert joined == []


def test_a_port_that_another_program_has_is_told(joined, monkeypatch):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        set_jax(
            monkeypatch,
            COORDINATOR_ADDRESS=f"localhost:{port}",
            NUM_PROCESSES="2",
            PROCESS_ID="0",
        )
        with pytest.raises(ValueError, match=f"port {port} cannot be used here .*in use.*choose"):
            distributed.initialize()
    assert joined == []


@pytest.mark.parametrize(
    ("mine", "told"), [("0", "process 1 is missing"), ("1", "process 0 does not answer at")]
)
def test_a_process_that_nobody_joins_says_who_is_missing_and_ends_with_2(mine, told):
    with socket.create_server(("", 0)) as probe:
        port = probe.getsockname()[1]
    environment = os.environ | {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": mine,
        "JAXSCALE_JOIN_SECONDS": "1",
    }
    code = "from jaxscale import distributed; distributed.initialize()"
    answer = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600
    )
    assert answer.returncode == 2, answer.stderr
    assert (
        f"\nerror: {told}" in answer.stderr
        and "after 1 s (explicit variables: process " in answer.stderr
    )
    assert "Traceback" not in answer.stderr


def test_a_platform_that_is_not_here_is_told(monkeypatch):
    def devices():
        raise RuntimeError("Unable to initialize backend 'cuda': no device\nmore")

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(
        ValueError,
        match=r"JAX_PLATFORMS='cuda' finds no device: .*'cuda': no device. Unset it",
    ):
        distributed.describe()


def test_a_process_says_its_devices_its_jax_and_how_many_there_are():
    assert distributed.describe() == f"jax {jax.__version__} on cpu: 8 x cpu, 1 process"
