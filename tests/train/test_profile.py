"""A profile holds the steps that were asked for, whole and no others; the run stays as it is."""

import contextlib
import itertools
import shutil
import warnings
from typing import Any

import jax
import pytest

from jaxscale import config as run_config
from jaxscale.config import Config, EvalConfig, ProfileConfig
from jaxscale.train import run
from jaxscale.train.loop import train
from jaxscale.train.stop import Interrupts
from tests.train.small import config_of, records, write_cats


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    doing = "sat on the mat and looked at the moon"
    return write_cats(tmp_path_factory.mktemp("text"), documents=8, doing=doing, times=12)


def run_of(folder, **changes) -> Config:
    """Steps 2 and 4 are each followed by an evaluation."""
    defaults: dict[str, Any] = dict(steps=5, evaluation=EvalConfig(batches=1, every=2))
    return config_of(folder, eval_fraction=0.3, **(defaults | changes))


@pytest.fixture(scope="module")
def plain(folder):
    """The workdir of a run without a profile."""
    train(run_of(folder), folder / "plain")
    return folder / "plain"


def losses(workdir):
    return {
        (record["step"], key): record[key]
        for record in records(workdir)
        for key in ("loss", "eval_loss")
        if key in record
    }


def profiled_steps(workdir):
    """The steps in a run's one trace, as the loop marked them, and whether an evaluation is too."""
    (path,) = (workdir / "profile").rglob("*.xplane.pb")
    with warnings.catch_warnings():
        # How jaxlib makes its types, under Python 3.12.
        warnings.simplefilter("ignore", DeprecationWarning)
        events = [
            event
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes
            for line in plane.lines
            for event in line.events
        ]
        steps = sorted(dict(event.stats)["step_num"] for event in events if event.name == "train")
        is_evaluated = any("held_out_loss" in event.name for event in events)
        assert is_evaluated == any(event.name == "evaluation" for event in events)
        return steps, is_evaluated


def test_the_trace_has_the_steps_asked_for_and_the_run_is_what_it_is_without(
    folder, plain, tmp_path
):
    train(run_of(folder, profile=ProfileConfig(start=2, steps=2)), tmp_path)
    # The evaluation after step 2 comes before the trace, and that after step 4 comes after it.
    assert profiled_steps(tmp_path) == ([3, 4], False)
    assert losses(tmp_path) == losses(plain) and len(losses(tmp_path)) == 5 + 4
    assert not (plain / "profile").exists()


def test_the_steps_count_from_the_first_of_this_process(folder, plain, tmp_path):
    shutil.copytree(plain, tmp_path / "run")
    train(run_of(folder, steps=8, profile=ProfileConfig(steps=2)), tmp_path / "run")
    # The evaluation after step 6 is between them.
    assert profiled_steps(tmp_path / "run") == ([6, 7], True)


def test_an_interrupted_run_keeps_what_was_recorded(folder, tmp_path, monkeypatch):
    calls = itertools.count()

    class AtTheThird(Interrupts):
        def __call__(self) -> bool:
            return next(calls) == 2

    told = AtTheThird()
    told.code = 130
    monkeypatch.setattr(run, "interrupts", lambda: contextlib.nullcontext(told))
    assert train(run_of(folder, profile=ProfileConfig(steps=4)), tmp_path).interrupted
    assert profiled_steps(tmp_path)[0] == [1, 2]


def test_what_cannot_be_recorded_is_refused(folder):
    run_config.validate(run_of(folder, profile=ProfileConfig(start=3, steps=2)))
    # Off, wherever it would start.
    run_config.validate(run_of(folder, profile=ProfileConfig(start=9)))
    with pytest.raises(
        ValueError,
        match=r"config.profile.steps=2: with config.profile.start=4 it goes beyond config.steps=5",
    ):
        run_config.validate(run_of(folder, profile=ProfileConfig(start=4, steps=2)))
    with pytest.raises(ValueError, match="config.profile.steps=-1: set it to 0 or more"):
        run_config.validate(run_of(folder, profile=ProfileConfig(steps=-1)))
