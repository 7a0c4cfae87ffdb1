"""Processes join as the environment says, and what they agree on is the same on each of them."""

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
    for name in ("SLURM_NTASKS", "SLURM_STEP_ID", "JAX_COORDINATOR_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return calls


def test_a_process_that_is_alone_joins_nobody(joined, monkeypatch):
    distributed.initialize()
    monkeypatch.setenv("SLURM_NTASKS", "8")  # an allocation, but no job step of it
    distributed.initialize()
    assert joined == []


def test_the_tasks_of_a_slurm_step_join(joined, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    distributed.initialize()
    assert joined == [{}]


def test_jaxs_own_variables_say_who_joins_and_a_missing_one_is_named(joined, monkeypatch):
    for name, value in dict(COORDINATOR_ADDRESS="h:1", NUM_PROCESSES="4", PROCESS_ID="3").items():
        monkeypatch.setenv(f"JAX_{name}", value)
    distributed.initialize()
    assert joined == [{"num_processes": 4, "process_id": 3}]
    monkeypatch.delenv("JAX_PROCESS_ID")
    with pytest.raises(ValueError, match="JAX_PROCESS_ID='' must be a whole number when"):
        distributed.initialize()
