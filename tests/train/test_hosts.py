"""A run of four processes is that of one: its losses, its checkpoints, and its end if one is lost.

By scripts/launch_local.py, over gloo.
"""

import dataclasses
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxscale import command_line
from jaxscale.config import (
    CheckpointConfig,
    EvalConfig,
    LogConfig,
    MeshConfig,
    SampleConfig,
)
from jaxscale.launch import EXIT_AGAIN
from jaxscale.train.loop import train
from tests.train.hosts import PATIENCE, ROOT, children, finish, launch, losses, wait_for_step

# float32, sums in another order: gloo's, or those of another mesh.
LOSS_RTOL = 1e-5

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config_file(tmp_path_factory, write_small_config):
    return write_small_config(tmp_path_factory.mktemp("text"), batch_size=8)


@pytest.fixture(scope="module")
def config(config_file):
    return dataclasses.replace(
        command_line.read_config([f"--config={config_file}", "--config.schedule.warmup_steps=2"]),
        steps=12,
        checkpoint=CheckpointConfig(every=4, keep_last=9),
        evaluation=EvalConfig(batches=1),
        log=LogConfig(tensorboard=False),
        sample=SampleConfig(tokens=0),
    )


@pytest.fixture(scope="module")
def launched(config_file):
    """`launched(4, workdir, "--config.x=y")`: as `launch`, by default of the small config."""
    return functools.partial(launch, config=config_file)


def assert_close(mine, theirs):
    assert list(mine) == list(theirs) == list(range(1, 13))
    np.testing.assert_allclose(list(mine.values()), list(theirs.values()), rtol=LOSS_RTOL)


@pytest.fixture(scope="module")
def of_one(config, tmp_path_factory):
    """The workdir of a run of one process, on eight devices."""
    workdir = tmp_path_factory.mktemp("one")
    train(config, workdir)
    return workdir


@pytest.fixture(scope="module")
def of_four(launched, tmp_path_factory):
    """The workdir of the same run of four processes, and what they printed."""
    workdir = tmp_path_factory.mktemp("four") / "run"
    return workdir, finish(launched(4, workdir))


def test_four_processes_train_like_one(of_four, of_one):
    workdir, output = of_four
    assert "[0] jax " in output and "on cpu: 8 x cpu, 4 processes" in output
    # XLA would end it after 60 s, with no name.
    assert "XLA_FLAGS --xla_cpu_collective_call_terminate_timeout_seconds=86400 (def" in output
    assert_close(losses(workdir), losses(of_one))
    (command,) = re.findall(r"train on with: (.*)", output)
    assert "scripts/launch_local.py -n 4" in command and command.endswith("--config.steps=24")


def from_step_four(source, workdir):
    """A copy of the workdir as it was when step 4 had been saved."""
    shutil.copytree(source, workdir)
    for newer in (8, 12):
        shutil.rmtree(workdir / "checkpoints" / str(newer))
    return workdir


def test_what_four_saved_two_go_on_with_on_another_mesh(of_four, of_one, launched, tmp_path):
    workdir = from_step_four(of_four[0], tmp_path / "run")
    mesh = ("--config.mesh.data=2", "--config.mesh.fsdp=1", "--config.mesh.tensor=2")
    output = finish(launched(2, workdir, *mesh))
    assert "continuing from the checkpoint of step 4" in output
    assert "on cpu: 4 x cpu, 2 processes" in output
    assert_close(losses(workdir), losses(of_one))


def test_what_four_saved_one_goes_on_with_on_another_mesh(of_four, of_one, config, tmp_path):
    workdir = from_step_four(of_four[0], tmp_path / "run")
    mesh = MeshConfig(data=2, fsdp=2, tensor=2)
    train(dataclasses.replace(config, mesh=mesh), workdir)
    assert_close(losses(workdir), losses(of_one))


@pytest.mark.parametrize("lost", [0, 2])
def test_a_process_that_is_killed_is_named_by_the_others_and_the_run_ends(launched, tmp_path, lost):
    workdir = tmp_path / "run"
    settings = ("--config.batch_size=12", "--config.mesh.data=6", "--config.mesh.fsdp=1")
    started = launched(3, workdir, "--config.steps=10000", *settings)
    wait_for_step(started, workdir, 3)
    os.kill(children(started[0].pid)[lost], signal.SIGKILL)
    killed_at = time.monotonic()
    output = finish(started, code=137)
    assert time.monotonic() - killed_at < 30
    for other in {0, 1, 2} - {lost}:
        named = rf"^\[{other}\] error: process {lost} \(host .*, pid \d+\) vanished: killed.*; "
        named += rf"continue with: cd .* scripts/launch_local.py -n 3 .* --workdir={workdir} "
        assert re.search(named, output, re.MULTILINE), output
    assert f"launch_local: process {lost} was killed by SIGKILL" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("stuck", [0, 1])
def test_a_process_that_is_stopped_is_named_with_its_stack_and_the_run_ends(
    launched, tmp_path, stuck
):
    # A save may be where it is stopped, and is named then.
    settings = ("--config.steps=10000", "--config.checkpoint.every=0")
    started = launched(2, tmp_path / "run", *settings)
    wait_for_step(started, tmp_path / "run", 3)
    os.kill(children(started[0].pid)[stuck], signal.SIGSTOP)
    stopped_at = time.monotonic()
    output = finish(started, code=EXIT_AGAIN)
    assert time.monotonic() - stopped_at < 60
    named = rf"error: process {stuck} \(host .*, pid \d+\) is stuck: stopped by a signal for "
    # The signal may come while it waits for its batch.
    named += r"\d+ s, (in|waiting for the batch of) step \d+; the other is in step \d+; "
    named += r"continue with: cd .*/launch_local.py -n 2 "
    stack = rf"\[.\] main thread of process {stuck}, innermost call first:\n(\[.\]   File .*\n)*"
    stack += r"\[.\]   File .*/jaxscale/train/loop.py\", line \d+ in train"
    for number in (0, 1):
        assert re.search(rf"^\[{number}\] {named}", output, re.MULTILINE), output
        assert re.search(rf"\[{number}\] stacks of process {number} \(", output), output
        # Of its other threads too.
        listens = rf"^\[{number}\]   File .*/watched.py\", line \d+ in _listen"
        assert re.search(listens, output, re.MULTILINE), output
    assert re.search(stack, output), output


# At step 3 process 1 is killed, and process 0 aborted as soon as that can be noticed, as by gloo.
ABORT = """
import os, signal, threading, time
from pathlib import Path
from jaxscale.train.recorder import Recorder

def abort_without_other():
    pid = Path("{pid_file}")
    while not pid.exists() or Path("/proc", pid.read_text() or "self").exists():
        time.sleep(0.001)
    os.abort()

def step(self, number, metrics, *, state, original=Recorder.step):
    if number == 3 and os.environ["JAXSCALE_PROCESS_ID"] == "1":
        Path("{pid_file}").write_text(str(os.getpid()))
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    elif number == 2 and os.environ["JAXSCALE_PROCESS_ID"] == "0":
        threading.Thread(target=abort_without_other, daemon=True).start()
    return original(self, number, metrics, state=state)

Recorder.step = step
"""


def test_of_a_process_that_is_aborted_before_it_names_the_one_that_was_killed_the_watchdog_does(
    launched, config_file, tmp_path
):
    faulty = tmp_path / "faulty.py"
    faulty.write_text(ABORT.format(pid_file=tmp_path / "pid") + config_file.read_text())
    output = finish(launched(2, tmp_path / "run", config=faulty), code=137)
    named = r"^\[0\] error: process 1 \(host .*, pid \d+\) vanished: killed.*; continue with: cd "
    assert re.search(named, output, re.MULTILINE), output
    assert re.search(r"^\[0\] Fatal Python error: Aborted", output, re.MULTILINE), output


# At step 3 process 1 alone is aborted, as by a check of XLA's.
CRASH = """
import os
from jaxscale.train.recorder import Recorder

def step(self, number, metrics, *, state, original=Recorder.step):
    if number == 3 and os.environ["JAXSCALE_PROCESS_ID"] == "1":
        os.abort()
    return original(self, number, metrics, state=state)

Recorder.step = step
"""


def test_a_process_that_crashes_is_named_with_how_and_shows_its_stacks(
    launched, config_file, tmp_path
):
    faulty = tmp_path / "faulty.py"
    faulty.write_text(CRASH + config_file.read_text())
    output = finish(launched(2, tmp_path / "run", config=faulty), code=134)
    named = r"^\[0\] error: process 1 \(host .*, pid \d+\) crashed: Aborted; the log has "
    assert re.search(named, output, re.MULTILINE), output
    assert re.search(r"^\[1\] Fatal Python error: Aborted", output, re.MULTILINE), output
    assert re.search(r"^\[1\]   File .*faulty.py\", line \d+ in step", output, re.MULTILINE), output


# At step 3 process 1 alone keeps Python to itself, in C, for good: none of its threads goes on.
HANG = """
import ctypes, os
from jaxscale.train.recorder import Recorder

def step(self, number, metrics, *, state, original=Recorder.step):
    if number == 3 and os.environ.get("JAXSCALE_PROCESS_ID", "1") == "1":
        metrics["loss"].block_until_ready()  # so that the other goes on, and is a step ahead
        lock, once = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
        lock(once), lock(once)
    return original(self, number, metrics, state=state)

Recorder.step = step
"""


def test_a_process_that_hangs_in_c_is_named_and_the_run_ends(launched, config_file, tmp_path):
    faulty = tmp_path / "faulty.py"
    faulty.write_text(HANG + config_file.read_text())
    limit = "--config.watchdog.step_seconds=5"
    output = finish(launched(2, tmp_path / "run", limit, config=faulty), code=EXIT_AGAIN)
    words = r"is stuck: \d+ s in step \d+ \(\d+ s are allowed\)"
    assert re.search(rf"^\[0\] error: process 1 \(host .*\) {words}", output, re.MULTILINE), output
    assert re.search(r"^\[.\]   File .*faulty.py\", line \d+ in step", output, re.MULTILINE), output


# In the evaluation after step 4 process 1 hangs in batch 20. Each batch takes 0.2 s, the evaluation
# of 30 before it 6 s.
HANG_IN_EVALUATION = """
import os, time
from jaxscale.train.pace import Progress

def running(self, batch, original=Progress.running):
    original(self, batch)
    time.sleep(0.2 * (self._pace is not None))
    if self._step == 4 and batch == 20 and os.environ["JAXSCALE_PROCESS_ID"] == "1":
        time.sleep(3600)

Progress.running = running
"""


def test_a_process_that_hangs_in_a_long_evaluation_is_named_as_soon_as_in_a_step(
    launched, config_file, tmp_path
):
    faulty = tmp_path / "faulty.py"
    faulty.write_text(HANG_IN_EVALUATION + config_file.read_text())
    settings = ("--config.evaluation.every=2", "--config.evaluation.batches=30")
    limit = "--config.watchdog.step_seconds=5"
    output = finish(launched(2, tmp_path / "run", limit, *settings, config=faulty), EXIT_AGAIN)
    words = r"is stuck: \d+ s in batch 20 of the evaluation after step 4 \((\d+) s are allowed\)"
    named = rf"^\[0\] error: process 1 \(host .*\) {words}; the other is in batch 21 of the eval"
    (allowed,) = re.findall(named, output, re.MULTILINE)
    assert int(allowed) < 5 + 6  # three times the whole evaluation would be 23
    assert re.search(r"^\[.\]   File .*faulty.py\", line \d+ in running", output, re.MULTILINE)


def test_a_process_that_is_alone_and_hangs_ends_with_its_stack(config_file, tmp_path):
    faulty = tmp_path / "faulty.py"
    faulty.write_text(HANG + config_file.read_text())
    command = [sys.executable, "scripts/train.py", f"--config={faulty}"]
    command += [f"--workdir={tmp_path / 'run'}", "--config.watchdog.step_seconds=5"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert answer.returncode == -signal.SIGKILL, answer.stderr
    assert "error: process 0 (host " in answer.stderr and "is stuck: " in answer.stderr
    assert f"continue with: cd {ROOT} && " in answer.stderr.partition("is stuck: ")[2]
    assert re.search(r"File .*faulty.py\", line \d+ in step", answer.stderr), answer.stderr


def test_a_signal_stops_all_processes_at_the_same_step(launched, tmp_path):
    workdir = tmp_path / "run"
    started = launched(2, workdir, "--config.steps=10000")
    wait_for_step(started, workdir, 2)
    os.kill(children(started[0].pid)[1], signal.SIGTERM)  # one alone, and not the lead
    output = finish(started, code=EXIT_AGAIN)
    (step,) = re.findall(r"^\[0\] stopped at step (\d+) of 10000 and saved", output, re.MULTILINE)
    assert (workdir / "checkpoints" / step).is_dir() and max(losses(workdir)) == int(step)


# At step 3 process 1 alone cannot go on, and what it closes waits for the others.
FAULT = """
import os, time
from jaxscale import distributed
from jaxscale.checkpoint.checkpointer import Checkpointer
from jaxscale.train.recorder import Recorder

def step(self, number, metrics, *, state, original=Recorder.step):
    if number == 3 and os.environ["JAXSCALE_PROCESS_ID"] == "1":
        Checkpointer.close = lambda self: time.sleep(3600)
        raise OSError(5, "Input/output error", "/data/corpus.bin")
    return original(self, number, metrics, state=state)

Recorder.step = step
distributed.CLOSING_SECONDS = 1.0
"""


def test_a_process_that_fails_alone_ends_the_others_with_its_own_words(
    launched, config_file, tmp_path
):
    faulty = tmp_path / "faulty.py"
    faulty.write_text(FAULT + config_file.read_text())
    output = finish(launched(2, tmp_path / "run", config=faulty), code=1)
    words = re.escape("failed: [Errno 5] Input/output error: '/data/corpus.bin'")
    assert re.search(rf"^\[0\] error: process 1 \(host .*\) {words}", output, re.MULTILINE), output
    assert "[1] OSError: [Errno 5] Input/output error: '/data/corpus.bin'" in output
    assert "launch_local: process 1 ended with exit code 1, the first to fail" in output


# While step 8 is saved, process 1 alone can write no file of more than 4 kB.
NO_SPACE = """
import os, resource
from jaxscale.checkpoint.checkpointer import Checkpointer

def finish(self, step, *arguments, original=Checkpointer._finish, **options):
    try:
        return original(self, step, *arguments, **options)
    finally:
        if step == 8:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)

def save(self, step, *arguments, original=Checkpointer.save, **options):
    if step == 8 and os.environ["JAXSCALE_PROCESS_ID"] == "1":
        self.wait()  # the save of step 4 may be in flight
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    return original(self, step, *arguments, **options)

Checkpointer._finish, Checkpointer.save = finish, save
"""


def test_a_save_that_fails_on_one_process_is_told_and_training_goes_on_bit_for_bit(
    launched, config_file, tmp_path
):
    settings = ("--config.checkpoint.keep_last=1", "--config.steps=16")
    finish(launched(2, tmp_path / "undisturbed", *settings))
    faulty = tmp_path / "faulty.py"
    faulty.write_text(NO_SPACE + config_file.read_text())
    workdir = tmp_path / "run"
    output = finish(launched(2, workdir, *settings, config=faulty))
    (told,) = re.findall(r"^.*saving step 8 .*$", output, re.MULTILINE)
    assert told.startswith(f"[0] saving step 8 to {workdir}/checkpoints failed: process 1 (host ")
    assert "File too large" in told
    assert told.endswith("Training goes on; the last checkpoint is of step 4")
    assert "Traceback" not in output
    assert losses(workdir) == losses(tmp_path / "undisturbed") and len(losses(workdir)) == 16
    saved = re.findall(r"^\[0\] saved step (\d+):", output, re.MULTILINE)
    assert saved == ["4", "12", "16"]
    assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == ["16"]
