"""A run with delayed scales: its histories in checkpoints, and other recipes'."""

import dataclasses
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.config import CheckpointConfig, PrecisionConfig, Recipe, SampleConfig
from jaxscale.step import delayed
from jaxscale.step.delayed import EMPTY
from jaxscale.train.loop import train
from tests.train.small import config_of, leaves_saved, steps, write_cats

DELAYED = PrecisionConfig(recipe=Recipe.FP8_DELAYED, emulate=True, history=4)
NAMES = {f"amax.layers.{name}" for name in ("down", "gate", "out", "qkv", "up")}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return config_of(
        write_cats(tmp_path_factory.mktemp("text")),
        steps=6,
        precision=DELAYED,
        checkpoint=CheckpointConfig(every=1, keep_last=99),
    )


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """The workdir of a run of 6 steps, which ends with a sample."""
    workdir = tmp_path_factory.mktemp("run") / "whole"
    told = dataclasses.replace(config, sample=SampleConfig(tokens=2))
    assert train(told, workdir).step == config.steps
    return workdir


def from_step(whole, folder, *, step):
    """A copy of the workdir as it was then."""
    again = shutil.copytree(whole, folder)
    for path in (again / "checkpoints").iterdir():
        if int(path.name) > step:
            shutil.rmtree(path)
    return again


def histories_saved(workdir, step) -> dict[str, np.ndarray]:
    saved = leaves_saved(workdir, step)
    return {name: value for name, value in saved.items() if name.startswith("amax.")}


def test_a_run_that_goes_on_has_the_same_bits(config, whole, tmp_path):
    again = from_step(whole, tmp_path / "again", step=3)
    train(config, again)
    here, there = (leaves_saved(workdir, 6) for workdir in (again, whole))
    assert NAMES <= set(here)
    assert {name: value.tobytes() for name, value in here.items()} == {
        name: value.tobytes() for name, value in there.items()
    }
    assert all("saturated" in record for record in steps(again))


def test_a_run_goes_on_with_another_recipe_and_back(config, whole, tmp_path, caplog):
    again = from_step(whole, tmp_path / "again", step=3)
    tensorwise = PrecisionConfig(recipe=Recipe.FP8_TENSORWISE, emulate=True)
    train(dataclasses.replace(config, precision=tensorwise, steps=4), again)
    assert not histories_saved(again, 4)
    with caplog.at_level(logging.INFO):
        train(config, again)
    assert (
        "the checkpoint has no largest values for delayed scales of layers.down, layers.gate, "
        "layers.out, layers.qkv, layers.up" in caplog.text
    )
    for name, history in histories_saved(again, 6).items():
        assert ((history != EMPTY) == [True, True, False, False]).all(), name


def test_a_history_may_become_longer(config, whole, tmp_path):
    before = histories_saved(whole, 5)
    again = from_step(whole, tmp_path / "again", step=5)
    precision = dataclasses.replace(DELAYED, history=6)
    train(dataclasses.replace(config, precision=precision), again)
    for name, history in histories_saved(again, 6).items():
        np.testing.assert_array_equal(history[..., 1:5], before[name])
        assert history.shape[-1] == 6 and (history[..., 5] == EMPTY).all()


def test_or_shorter():
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.ShapeDtypeStruct((1, 2, 2), jnp.int8, sharding=here)
    saved = {"amax.layers.up": jnp.arange(6, dtype=jnp.int8).reshape(1, 2, 3)}
    fitted = delayed.of_checkpoint(saved, {"amax.layers.up": wanted})
    assert fitted["amax.layers.up"].tolist() == [[[0, 1], [3, 4]]]
