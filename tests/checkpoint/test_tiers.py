"""A fast disk and copies of it: the newer of the two is restored, and neither lies."""

import json
import logging
import shutil
import threading

import jax
import numpy as np
import pytest

from jaxscale.checkpoint import checkpointer, tiers
from jaxscale.checkpoint.checkpointer import Checkpointer
from jaxscale.checkpoint.stored import CheckpointError
from jaxscale.config import CheckpointConfig

SHARDING = jax.sharding.SingleDeviceSharding(jax.devices()[0])
TARGET = {"w": jax.ShapeDtypeStruct((100,), np.float32, sharding=SHARDING)}


def state(step):
    return {"w": jax.device_put(np.full(100, step, np.float32), SHARDING)}


@pytest.fixture
def opened(tmp_path):
    """`opened()`: the checkpoints of tmp_path/run, with a local tier."""

    def opened(**settings):
        (tmp_path / "run").mkdir(exist_ok=True)
        config = CheckpointConfig(local=str(tmp_path / "local"), **settings)
        return tiers.open_checkpoints(config, tmp_path / "run" / "checkpoints")

    return opened


def steps_in(folder):
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())


def local_of(tmp_path):
    return tmp_path / "local" / (tmp_path / "run" / "checkpoints" / tiers.ID).read_text()


def save(checkpoints, *steps):
    for step in steps:
        checkpoints.save(step, state(step), metadata={"step": step})
        checkpoints.wait()


def test_what_is_saved_is_copied_and_either_is_restored(opened, tmp_path):
    shared, local = tmp_path / "run" / "checkpoints", None
    with opened(keep_last=3) as checkpoints:
        save(checkpoints, 1, 2, 3, 4)
        local = local_of(tmp_path)
        assert steps_in(shared) == [2, 3, 4] and steps_in(local) == [3, 4]
    for gone in (local, shared):
        for path in gone.glob("[0-9]*"):
            shutil.rmtree(path)
        with opened() as checkpoints:
            if gone == shared:
                assert checkpoints.restore(TARGET) is None
                break
            step, restored, metadata = checkpoints.restore(TARGET)
            assert (step, metadata, checkpoints.latest_step()) == (4, {"step": 4}, 4)
            assert (np.asarray(restored["w"]) == 4).all()
            assert checkpoints.restore(TARGET, before=4)[0] == 3
    with Checkpointer(shared, keep_last=1) as plain:  # and without the tier
        assert plain.restore(TARGET) is None


def test_a_damaged_local_step_is_taken_from_the_shared_folder(opened, tmp_path, caplog):
    with opened() as checkpoints:
        save(checkpoints, 1, 2)
    path = local_of(tmp_path) / "2" / "metadata.json"
    path.write_bytes(path.read_bytes()[:-1])
    with opened() as checkpoints:
        assert checkpoints.latest_step() == 2
        assert checkpoints.restore(TARGET)[0] == 2
    assert "checkpoint step 2 in" in caplog.text and "local" in caplog.text


def test_a_save_waits_for_no_copy_and_what_is_not_copied_in_time_is_left_out(
    opened, tmp_path, monkeypatch
):
    may_copy, copytree = threading.Event(), shutil.copytree
    monkeypatch.setattr(
        checkpointer.shutil, "copytree", lambda *a: may_copy.wait(60) and copytree(*a)
    )
    with opened(keep_last=9, keep_every=4) as checkpoints:
        for step in range(1, 7):
            checkpoints.save(step, state(step), metadata={})
        checkpoints._fast.wait()
        local = local_of(tmp_path)
        # The one that is being copied stays, and so does the one to be kept for good.
        assert steps_in(local)[-2:] == [5, 6] and {1, 4} <= set(steps_in(local))
        may_copy.set()
    assert steps_in(tmp_path / "run" / "checkpoints") == [1, 4, 6]


def test_a_copy_that_fails_is_told_and_the_next_is_tried(opened, tmp_path, monkeypatch, caplog):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    caplog.set_level(logging.INFO)
    with opened() as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(checkpointer.shutil, "copytree", full)
            checkpoints.save(1, state(1), metadata={})
            with pytest.raises(CheckpointError, match="saving step 1 to .*run.* No space left"):
                checkpoints.wait()
            checkpoints.save(2, state(2), metadata={})
            checkpoints._fast.wait()
            checkpoints._copies[0].exception()
            checkpoints.save(3, state(3), metadata={})
            assert "Training goes on; it is on the local disk alone" in caplog.text
            checkpoints._fast.wait()
            with pytest.raises(CheckpointError):
                checkpoints.wait()
        save(checkpoints, 4)
    assert steps_in(tmp_path / "run" / "checkpoints") == [4]


def test_a_copy_that_was_cut_short_is_made_again(opened, tmp_path):
    with opened() as checkpoints:
        save(checkpoints, 1)
    shared = tmp_path / "run" / "checkpoints"
    (shared / "1").rename(shared / "1.saving")
    (shared / "1.saving" / "checksums.json").unlink()
    with opened() as checkpoints:
        assert checkpoints.restore(TARGET)[0] == 1
        save(checkpoints, 2)
    assert steps_in(shared) == [2] and not list(shared.glob("*.saving"))


def test_a_workdir_made_anew_does_not_go_on_from_the_old_ones_local_steps(opened, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with opened() as checkpoints:
        save(checkpoints, 7)
    old = local_of(tmp_path)
    shutil.rmtree(tmp_path / "run")
    with opened() as checkpoints:
        assert checkpoints.latest_step() is None
    assert not old.exists() and f"removing {old}" in caplog.text
    assert json.loads((local_of(tmp_path) / tiers.WORKDIR).exists() and "true")
