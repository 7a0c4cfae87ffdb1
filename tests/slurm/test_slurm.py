"""scripts/train.slurm on a real SLURM of two nodes: to the end, preempted, killed, cancelled.

`make test-slurm` runs it. Four processes, each with one CPU device, over gloo.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from tests.slurm.cluster import Cluster, reason_not_here

ROOT = Path(__file__).parents[2]
PATIENCE = 300
# The same sums, over gloo in another order: float32.
LOSS_RTOL = 1e-5

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.skipif(reason_not_here() is not None, reason=f"no SLURM: {reason_not_here()}"),
]

NUM_STEPS = 40
SETTINGS = (
    f"--config.steps={NUM_STEPS}",
    # Little to compile, and steps of 0.2 s, long enough for SLURM to come between.
    "--config.model.num_layers=1",
    "--config.batch_size=32",
    "--config.seq_len=128",
    # A tenth of the config's own, with which 1e-5 becomes 1e-3 in ten steps on so little text.
    "--config.schedule.peak=3e-4",
    "--config.schedule.warmup_steps=2",
    "--config.checkpoint.every=10",
    "--config.evaluation.batches=1",
    "--config.sample.tokens=0",
    "--config.log.tensorboard=False",
    "--config.data.eval_fraction=0.3",
)


@pytest.fixture(scope="module")
def cluster():
    # Not in pytest's own folder, which is closed to munged's user.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        os.chmod(folder, 0o755)
        with Cluster(Path(folder), num_nodes=2) as cluster:
            yield cluster


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Settings that name a small text."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(8):
        text = f"The cat {number} sat on the mat and looked at the moon. " * 12
        (folder / f"{number}.txt").write_text(text)
    return (f"--config.data.path={folder}/*.txt", f"--config.data.cache_dir={folder}/cache")


class Job:
    """A job of scripts/train.slurm. nodes: as sbatch has them; on_node: processes on each."""

    def __init__(self, cluster, workdir, *settings, nodes="2", on_node=2, **variables):
        self.cluster, self.workdir = cluster, workdir
        self.log = workdir.with_suffix(".log")
        said = cluster.say(
            "sbatch",
            "--parsable",
            f"--nodes={nodes}",
            "--gpus-per-node=0",
            f"--output={self.log}",
            f"--chdir={ROOT}",
            ROOT / "scripts" / "train.slurm",
            "configs/tiny.py",
            f"--workdir={workdir}",
            *settings,
            **(environment(devices=1) | {"JAXSCALE_PROCESSES": str(on_node)} | variables),
        )
        self.number = int(said)

    def state(self):
        return self.cluster.state(self.number)

    def wait_for_step(self, step):
        self.cluster.wait_for(
            lambda: max(losses(self.workdir), default=0) >= step,
            f"step {step}",
            seconds=PATIENCE,
        )

    def wait_for_restart(self, number):
        """Until it runs again."""
        self.cluster.wait_for(
            lambda: f"start {number}: " in self.said(), f"restart {number}", seconds=PATIENCE
        )

    def wait_for_end(self):
        """Its last state, such as COMPLETED."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        deadline = time.monotonic() + PATIENCE
        while (state := self.state()["JobState"]) not in over or "COMPLETING" in state:
            assert time.monotonic() < deadline, self.said() + self.cluster.logs()
            time.sleep(0.2)
        return state

    def said(self):
        return self.log.read_text() if self.log.exists() else ""

    def printed(self, process, *, start=0):
        return (self.workdir / "logs" / f"{self.number}.{start}" / f"{process}.log").read_text()

    def kill(self, process):
        """kill -9, as the kernel does it that has no memory left; returns when."""
        wanted = {f"SLURM_JOB_ID={self.number}", f"SLURM_PROCID={process}"}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_text().split("\0")
                variables = set((folder / "environ").read_text().split("\0"))
            except OSError:
                continue
            if "scripts/train.py" in words and wanted <= variables:
                os.kill(int(folder.name), signal.SIGKILL)
                return time.monotonic()
        raise AssertionError(f"no process {process}")


def environment(*, devices):
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": flags,
        "JAXSCALE_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
    }


def losses(workdir):
    """Loss by step; a step is on record once."""
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    pairs = [(record["step"], record["loss"]) for record in records if "loss" in record]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


@pytest.fixture(scope="module")
def undisturbed(cluster, data, tmp_path_factory):
    job = Job(cluster, tmp_path_factory.mktemp("undisturbed") / "run", *SETTINGS, *data)
    assert job.wait_for_end() == "COMPLETED", job.said() + job.printed(0)
    return job


def test_a_job_trains_like_one_process_and_each_of_its_own_has_a_log(undisturbed, data, tmp_path):
    command = [sys.executable, "scripts/train.py", "--config=configs/tiny.py"]
    subprocess.run(
        [*command, f"--workdir={tmp_path}", *SETTINGS, *data],
        cwd=ROOT,
        env=os.environ | environment(devices=4),
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=PATIENCE,
    )
    mine, theirs = losses(undisturbed.workdir), losses(tmp_path)
    assert list(mine) == list(theirs) == list(range(1, NUM_STEPS + 1))
    np.testing.assert_allclose(list(mine.values()), list(theirs.values()), rtol=LOSS_RTOL)
    assert "on cpu: 4 x cpu, 4 processes" in undisturbed.printed(0)
    assert "&& sbatch scripts/train.slurm configs/tiny.py" in undisturbed.printed(0)
    assert all("error" not in undisturbed.printed(number) for number in range(4))
    assert "4 processes on 127.0.0.[1-2]" in undisturbed.said()


def test_preempted_and_then_killed_it_comes_back_and_the_losses_are_the_same_bit_for_bit(
    cluster, undisturbed, data, tmp_path
):
    job = Job(cluster, tmp_path / "run", *SETTINGS, *data)
    job.wait_for_step(3)
    cluster.say("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 2")
    job.wait_for_restart(1)
    first = job.printed(0)
    assert "SIGTERM: finishing the step and saving" in first
    (step,) = re.findall(rf"stopped at step (\d+) of {NUM_STEPS} and saved", first)
    assert (
        "ended with exit code 75" in job.said() and "was told to stop, and has saved" in job.said()
    )

    job.wait_for_step(int(step) + 4)
    assert f"continuing from the checkpoint of step {step}" in job.printed(0, start=1)
    killed_at = job.kill(2)
    cluster.wait_for(lambda: "a failure" in job.said(), "the job to notice", seconds=PATIENCE)
    seconds = time.monotonic() - killed_at
    for process in (0, 1, 3):
        assert re.search(
            r"^error: process 2 \(host .*, pid \d+\) vanished", job.printed(process, start=1), re.M
        )
    print(f"kill -9 of a process: the step was over after {seconds:.1f} s")
    assert seconds < 30

    assert job.wait_for_end() == "COMPLETED", job.said() + job.printed(0, start=2)
    assert job.state()["Restarts"] == "2"
    assert losses(job.workdir) == losses(undisturbed.workdir)


def test_when_a_node_is_lost_it_goes_on_with_those_that_are_left(
    cluster, undisturbed, data, tmp_path
):
    job = Job(cluster, tmp_path / "run", *SETTINGS, *data, nodes="1-2")
    job.wait_for_step(13)  # 10 are saved
    node = job.state()["NodeList"]
    lost = cluster.say("scontrol", "show", "hostnames", node).split()[-1]
    # A node that is down comes back by itself here, where its slurmd runs on.
    cluster.say("scontrol", "update", f"nodename={lost}", "state=drain", "reason=lost")
    try:
        job.kill(3)
        job.wait_for_restart(1)
        assert job.wait_for_end() == "COMPLETED", job.said() + job.printed(0, start=1)
    finally:
        cluster.say("scontrol", "update", f"nodename={lost}", "state=resume", check=False)
    assert "on cpu: 4 x cpu, 4 processes" in job.printed(0)
    assert "on cpu: 2 x cpu, 2 processes" in job.printed(0, start=1)
    assert "continuing from the checkpoint of step 10" in job.printed(0, start=1)
    mine, theirs = losses(job.workdir), losses(undisturbed.workdir)
    assert list(mine) == list(theirs)
    np.testing.assert_allclose(list(mine.values()), list(theirs.values()), rtol=LOSS_RTOL)


def test_a_job_whose_time_is_up_comes_back_and_one_that_is_cancelled_does_not(
    cluster, data, tmp_path
):
    job = Job(cluster, tmp_path / "run", *SETTINGS, *data, "--config.steps=100000", on_node=1)
    job.wait_for_step(2)
    cluster.say("scancel", "--batch", "--signal=USR1", job.number)  # as --signal=B:USR1@180 does
    job.wait_for_restart(1)
    assert "(its time is up)" in job.said()
    assert "SIGUSR1: finishing the step and saving" in job.printed(0)
    last = max(losses(job.workdir))
    job.wait_for_step(last + 2)
    cluster.say("scancel", job.number)
    assert job.wait_for_end() == "CANCELLED"
    time.sleep(5)
    assert job.state()["JobState"] == "CANCELLED" and job.state()["Restarts"] == "1"


def test_a_mistake_is_told_in_the_jobs_log_and_does_not_come_back(cluster, data, tmp_path):
    job = Job(cluster, tmp_path / "run", *SETTINGS, *data, "--config.batch_size=0", on_node=1)
    assert job.wait_for_end() == "FAILED"
    assert job.state()["ExitCode"] == "2:0" and job.state()["Restarts"] == "0"
    assert "2 x error: config.batch_size=0: set it to 1 or more" in job.said()


def test_a_job_that_fails_again_and_again_without_a_new_checkpoint_gives_up(cluster, tmp_path):
    failing = {"JAXSCALE_PYTHON": "/bin/false", "JAXSCALE_MAX_FAILURES": "2"}
    job = Job(cluster, tmp_path / "run", on_node=1, **failing)
    assert job.wait_for_end() == "FAILED"
    assert job.state()["ExitCode"] == "1:0" and job.state()["Restarts"] == "1"
    assert "giving up: 2 failures in a row without a new checkpoint" in job.said()


def test_srun_of_the_doctor_compares_the_processes_of_two_nodes(cluster, tmp_path):
    words = ["--nodes=2", "--ntasks=2", "--label", f"--chdir={ROOT}"]
    command = [sys.executable, "scripts/doctor.py", f"--workdir={tmp_path}", "--gib=0.002"]
    text = cluster.say("srun", *words, *command, **environment(devices=1))
    assert re.search(r"^0: 2 processes$", text, re.MULTILINE), text
    assert len(re.findall(r"^0:   [01] +\S+ +cpu 0 ", text, re.MULTILINE)) == 2, text
    assert not re.search(r"^1: .*devices", text, re.MULTILINE)
