"""A device that corrupts the state of a run is named, and what it made wrong is never saved."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxscale import command_line
from jaxscale.compile.fit import CompiledUpdate
from jaxscale.config import (
    CheckpointConfig,
    EvalConfig,
    IntegrityConfig,
    LogConfig,
    MeshConfig,
    SampleConfig,
)
from jaxscale.launch import EXIT_CORRUPT
from jaxscale.step import replay
from jaxscale.step.state import from_flat, to_flat
from jaxscale.train.integrity import IntegrityError
from jaxscale.train.loop import train
from tests.corrupted import with_flipped_bit
from tests.train.small import steps

ROOT = Path(__file__).parents[2]
PATIENCE = 600


@pytest.fixture(scope="module")
def config_file(tmp_path_factory, write_small_config):
    return write_small_config(tmp_path_factory.mktemp("text"), batch_size=8)


@pytest.fixture(scope="module")
def config(config_file):
    return dataclasses.replace(
        command_line.read_config([f"--config={config_file}", "--config.schedule.warmup_steps=2"]),
        steps=8,
        checkpoint=CheckpointConfig(every=4, keep_last=9),
        mesh=MeshConfig(data=2, fsdp=4),
        evaluation=EvalConfig(batches=1),
        log=LogConfig(tensorboard=False),
        sample=SampleConfig(tokens=0),
        integrity=IntegrityConfig(replicas_every=3),
    )


def losses(workdir):
    return {record["step"]: record["loss"] for record in steps(workdir)}


def corrupted_at(step, monkeypatch, *, name="params.norm", device=5):
    """What the update of this step gives has a flipped bit on one device, the first time."""
    original, calls = CompiledUpdate.__call__, []

    def update(self, state, batch, **limits):
        state, metrics = original(self, state, batch, **limits)
        calls.append(step)
        if len(calls) == step:
            flat = to_flat(state)
            flipped = with_flipped_bit(flat[name], jax.devices()[device], bit=12)
            state = from_flat(state, flat | {name: flipped})
        return state, metrics

    monkeypatch.setattr(CompiledUpdate, "__call__", update)


def saved_steps(workdir):
    return sorted(int(p.name) for p in workdir.glob("checkpoints/*") if p.name.isdigit())


@pytest.fixture(scope="module")
def undisturbed(config, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed")
    train(config, workdir)
    return losses(workdir)


def test_a_corrupted_copy_stops_the_run_naming_the_device_and_the_same_command_goes_on(
    config, undisturbed, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        corrupted_at(5, patch)
        with pytest.raises(IntegrityError) as raised:
            train(config, tmp_path, command="the command")
    said = str(raised.value)
    assert re.match(
        r"step 6: silent corruption: params\.norm.* on device 5 \(process 0, host \S+\) is not "
        r"what the 7 other devices with a copy hold",
        said,
    )
    assert "This state is not saved; the last checkpoint is of step 4 in" in said
    assert said.endswith("then continue with: the command")
    assert saved_steps(tmp_path) == [4] and raised.value.exit_code == EXIT_CORRUPT
    train(config, tmp_path)
    assert losses(tmp_path) == undisturbed
    with open(tmp_path / "metrics.jsonl") as file:
        last = [json.loads(line) for line in file if "goodput" in line][-1]
    assert last["integrity_seconds"] > 0


@pytest.mark.parametrize("step", [4, 8])
def test_before_each_save_and_the_last_the_copies_are_compared(config, tmp_path, monkeypatch, step):
    config = dataclasses.replace(config, integrity=IntegrityConfig(replicas_every=1000))
    corrupted_at(step, monkeypatch, name="params.embedding", device=2)
    with pytest.raises(IntegrityError, match=rf"^step {step}: .*params\.embedding differs between"):
        train(config, tmp_path)
    assert saved_steps(tmp_path) == ([4] if step == 8 else [])


def test_replays_stop_a_run_of_which_a_device_computes_otherwise(config, tmp_path, monkeypatch):
    config = dataclasses.replace(
        config, integrity=IntegrityConfig(replicas_every=0, replay_every=2)
    )
    original, calls = replay.of_every_device, []

    def wrong(sums, mesh):
        values = original(sums, mesh).copy()
        calls.append(1)
        if len(calls) == 4:  # the second replay of step 4
            values[6, 0] += 1
        return values

    monkeypatch.setattr(replay, "of_every_device", wrong)
    with pytest.raises(IntegrityError) as raised:
        train(config, tmp_path)
    assert re.match(
        r"step 4: silent corruption: replayed from the same state and batch, the hidden states "
        r"came out otherwise the second time on device 6 \(process 0, host \S+\)\. This",
        str(raised.value),
    )
    assert saved_steps(tmp_path) == []


def test_with_everything_checked_each_step_the_losses_are_the_same_bit_for_bit(
    config, undisturbed, tmp_path
):
    checks = IntegrityConfig(replicas_every=1, replay_every=1)
    train(dataclasses.replace(config, integrity=checks), tmp_path)
    assert losses(tmp_path) == undisturbed


# In a run of two processes, on a device of the second.
FAULT = """
import sys
sys.path.insert(0, {root!r})
import jax
from jaxscale.compile.fit import CompiledUpdate
from jaxscale.step.state import from_flat, to_flat
from tests.corrupted import with_flipped_bit
from tests.train.small import steps

calls = []

def update(self, state, batch, original=CompiledUpdate.__call__, **limits):
    state, metrics = original(self, state, batch, **limits)
    calls.append(1)
    if len(calls) == 5:
        flat = to_flat(state)
        device = jax.devices()[3]
        flat["params.norm"] = with_flipped_bit(flat["params.norm"], device, bit=12)
        state = from_flat(state, flat)
    return state, metrics

CompiledUpdate.__call__ = update
"""


@pytest.mark.slow
def test_two_processes_stop_together_and_each_names_the_device_of_one(config_file, tmp_path):
    faulty = tmp_path / "faulty.py"
    faulty.write_text(FAULT.format(root=str(ROOT)) + config_file.read_text())
    command = [sys.executable, "scripts/launch_local.py", "-n", "2", "--cpu-devices=2", "--"]
    command += ["scripts/train.py", f"--config={faulty}", f"--workdir={tmp_path / 'run'}"]
    command += ["--config.steps=12", "--config.checkpoint.every=4", "--config.evaluation.batches=1"]
    command += ["--config.schedule.warmup_steps=2", "--config.sample.tokens=0"]
    command += ["--config.log.tensorboard=False", "--config.integrity.replicas_every=3"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == EXIT_CORRUPT, done.stdout
    for process in (0, 1):
        named = rf"^\[{process}\] error: step 6: silent corruption: params\.norm on device \S+ "
        named += r"\(process 1, host \S+\) is not what the 3 other devices with a copy hold"
        assert re.search(named, done.stdout, re.MULTILINE), done.stdout
    assert saved_steps(tmp_path / "run") == [4]
    assert "Traceback" not in done.stdout
