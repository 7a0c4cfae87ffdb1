"""A run in float16: overflows that stop nothing, its scale in checkpoints, and other dtypes'."""

import dataclasses
import logging
import shutil

import numpy as np
import pytest

from jaxscale.config import (
    BadStepsConfig,
    CheckpointConfig,
    Dtype,
    IntegrityConfig,
    LossScaleConfig,
)
from jaxscale.train.bad_steps import BadStepError
from jaxscale.train.loop import train
from tests.train.small import config_of, leaves_saved, steps, write_cats

# Gradients of this model overflow above 2**19 or so.
SETTINGS = LossScaleConfig(start=2.0**24, growth_every=3, hysteresis=2)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return config_of(
        write_cats(tmp_path_factory.mktemp("text")),
        steps=16,
        dtype=Dtype.FLOAT16,
        loss_scale=SETTINGS,
        checkpoint=CheckpointConfig(every=1, keep_last=99),
        integrity=IntegrityConfig(replicas_every=8, replay_every=8),
        bad_steps=BadStepsConfig(stop_after=2),
    )


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """The workdir of a run of 16 steps."""
    workdir = tmp_path_factory.mktemp("run") / "whole"
    assert train(config, workdir).step == config.steps
    return workdir


def scales(workdir):
    return [np.log2(record["loss_scale"]) for record in steps(workdir)]


def told(record):
    return {key: record[key] for key in ("step", "loss", "loss_scale", "overflow", "skipped")}


def test_overflows_lower_the_scale_stop_nothing_and_are_counted(whole):
    lines = steps(whole)
    overflows = [line["overflow"] for line in lines]
    assert overflows[:2] == [1, 1]  # more than config.bad_steps.stop_after in a row
    assert overflows == [line["skipped"] for line in lines] and sum(overflows) < 12
    assert scales(whole)[:4] == [24, 24, 23, 22] and scales(whole)[-1] < 22
    assert not (whole / "bad_batches.jsonl").exists()
    saved = leaves_saved(whole, 16)
    (count,) = [value for name, value in saved.items() if name.endswith("1.count")]
    assert count == 16 - sum(overflows) and saved["step"] == 16


def from_step(whole, folder, *, step):
    """A copy of the workdir as it was then."""
    again = shutil.copytree(whole, folder)
    for path in (again / "checkpoints").iterdir():
        if int(path.name) > step:
            shutil.rmtree(path)
    return again


def test_a_run_that_goes_on_amid_a_window_has_the_same_bits(config, whole, tmp_path, caplog):
    middle = next(
        line["step"]
        for line in steps(whole)[8:]
        if leaves_saved(whole, line["step"])["loss_scale.num_good"] == 1
    )
    again = from_step(whole, tmp_path / "again", step=middle)
    caplog.set_level(logging.INFO)
    train(config, again)
    assert f"continuing from the checkpoint of step {middle}" in caplog.text
    assert list(map(told, steps(again))) == list(map(told, steps(whole)))
    here, there = leaves_saved(again, 16), leaves_saved(whole, 16)
    assert {name: value.tobytes() for name, value in here.items()} == {
        name: value.tobytes() for name, value in there.items()
    }


def test_a_run_goes_on_in_another_dtype_and_back(config, whole, tmp_path):
    again = from_step(whole, tmp_path / "again", step=12)
    brain = dataclasses.replace(
        config, dtype=Dtype.BFLOAT16, loss_scale=LossScaleConfig(), steps=16
    )
    train(brain, again)
    assert not any("loss_scale" in name for name in leaves_saved(again, 16))
    for path in (again / "checkpoints").iterdir():
        if int(path.name) > 14:
            shutil.rmtree(path)
    train(config, again)
    saved = leaves_saved(again, 15)
    assert saved["loss_scale.scale"] == SETTINGS.start and saved["loss_scale.credits"] == 1


def test_an_overflow_at_the_least_scale_is_a_bad_step(config, tmp_path):
    stuck = dataclasses.replace(config, loss_scale=dataclasses.replace(SETTINGS, least=2.0**24))
    with pytest.raises(
        BadStepError, match="step 2: grad_norm is (inf|nan), the last of 2 in a row"
    ):
        train(stuck, tmp_path / "run")
    assert [line["overflow"] for line in steps(tmp_path / "run")] == [0, 0]
