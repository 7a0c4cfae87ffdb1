"""The watchdog is told how far an evaluation is, and allows what a batch takes, not all of them."""

import types
from typing import Any

import jax
import pytest

from jaxscale.config import WatchdogConfig
from jaxscale.train import evaluate, pace
from jaxscale.train.pace import Pace, Progress


class Story:
    """What happens, in its order, and a clock of our own."""

    def __init__(self):
        self.events, self.now = [], 0.0

    def at(self, step, phase, *, allowed, batch=0):
        self.events.append((phase, batch, allowed))

    def allowed(self, phase):
        return [seconds for told, _, seconds in self.events if told == phase]


@pytest.fixture
def story(monkeypatch):
    story = Story()
    monkeypatch.setattr(pace.distributed, "at", story.at)
    monkeypatch.setattr(pace, "time", types.SimpleNamespace(perf_counter=lambda: story.now))
    return story


@pytest.fixture
def watch():
    return Pace(WatchdogConfig(step_seconds=30.0, pause_seconds=600.0))


def test_a_batch_of_an_evaluation_is_allowed_what_the_slowest_took_however_many_there_are(
    story, watch
):
    for _ in range(2):
        progress = Progress(watch, step=7)
        for batch in range(1, 101):
            progress.reading(batch)
            progress.running(batch)
            story.now += 2.0 if batch == 2 else 1.0
            progress.done()
    # Reading takes what a disk takes; before the first is done there is no pace.
    assert set(story.allowed("held-out data")) == {600.0}
    assert story.allowed("evaluation")[:3] == [600.0, 33.0, 36.0]
    assert max(story.allowed("evaluation")[1:]) == 36.0 and story.events[-1] == (
        "evaluation",
        100,
        33.0,
    )


def test_a_limit_of_zero_is_none(story):
    progress = Progress(Pace(WatchdogConfig(step_seconds=0.0, pause_seconds=600.0)), step=7)
    progress.done()
    progress.running(2)
    assert story.events == [("evaluation", 2, 0.0)]


def test_without_a_pace_nothing_is_told(story):
    progress = Progress()
    progress.reading(1)
    progress.running(1)
    progress.done()
    assert story.events == []


@pytest.mark.parametrize("num_batches", [1, 3])
def test_a_batch_counts_as_done_once_the_devices_have_done_it_and_have_the_next(
    story, watch, monkeypatch, num_batches
):
    """The loss too is that of the sums."""
    plan: Any = types.SimpleNamespace(
        config=types.SimpleNamespace(evaluation=types.SimpleNamespace(batches=num_batches)),
        shared_options={},
    )

    def compiled(function, compiler_options):
        def sums_of(state, batch):
            story.events.append(f"given {batch}")
            return 2.0 * batch, batch

        return sums_of

    monkeypatch.setattr(jax, "jit", compiled)
    monkeypatch.setattr(
        jax, "block_until_ready", lambda sums: story.events.append(f"has {sums[1]}")
    )
    monkeypatch.setattr(evaluate, "device_batches", lambda *_, **__: (n for n in range(1, 9)))
    monkeypatch.setattr(watch, "took", lambda phase, seconds: story.events.append("done"))
    corpus: Any = types.SimpleNamespace(eval=())
    state: Any = None
    loss = evaluate.make_evaluate(plan, corpus)(state, Progress(watch, step=7))
    assert loss == 2.0
    told = {
        number: [("held-out data", number, 600.0), ("evaluation", number, 600.0), f"given {number}"]
        for number in (1, 2, 3)
    }
    wanted = told[1]
    for number in range(2, num_batches + 1):
        wanted = wanted + told[number] + [f"has {number - 1}", "done"]
    assert story.events == wanted + [f"has {num_batches}", "done"]
