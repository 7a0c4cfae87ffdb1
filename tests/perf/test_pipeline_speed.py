"""The script that times a pipeline's schedules finds the bubble that there is."""

import contextlib
import functools
import io
import json
import math
import statistics
from typing import Any

import jax
import pytest

from jaxscale.perf import pipeline_speed
from jaxscale.perf.records import RATE
from tests.perf.scripts import Script

TWO_LAYERS = "--config.model.num_layers=2"
# How ml_collections loads a config file.
pytestmark = pytest.mark.filterwarnings(
    "ignore:the load_module\\(\\) method is deprecated:DeprecationWarning"
)


@pytest.fixture(scope="module")
def config_file(tmp_path_factory, write_small_config):
    return write_small_config(tmp_path_factory.mktemp("config"), batch_size=4)


@pytest.fixture(scope="module")
def script():
    return Script("bench_pipeline")


@pytest.fixture(scope="module")
def printed(script, config_file):
    """(table, record) of one schedule on two devices."""
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        measure = functools.partial(pipeline_speed.measure, devices=jax.devices()[:2])
        patch.setattr(script.module.pipeline_speed, "measure", measure)
        with contextlib.redirect_stdout(output):
            words = ["--schedules=gpipe", "--microbatches=2,4", "--config.seq_len=32", TWO_LAYERS]
            assert script.run("--config", config_file, *words) == 0
    *table, last = output.getvalue().splitlines()
    return table, json.loads(last)


def test_each_number_of_microbatches_is_timed(printed):
    table, record = printed
    assert list(record["runs"]) == ["gpipe_2", "gpipe_4"] and not record["left_out"]
    for number, run in zip((2, 4), record["runs"].values(), strict=True):
        assert run["microbatches"] == number and len(run["all_step_seconds"]) == 2
        assert run[RATE] == pytest.approx(number * 32 / run["step_seconds"] / 2)
        assert run["bubble_of_the_table"] == pytest.approx(1 / (number + 1))
        assert run["predicted_memory_gib"] > 0 and math.isfinite(run["loss"])
    assert table[0] == "2 x cpu" and [line.split()[0] for line in table[1:]] == [
        "run",
        "gpipe_2",
        "gpipe_4",
    ]


def test_what_is_timed_before_others_is_told_at_once(config_file, monkeypatch, caplog):
    """A machine may be lent for less time than all schedules take."""

    def apart(timed):
        return [{name: each} for name, each in timed.items()]

    monkeypatch.setattr(pipeline_speed, "_with_one_state", apart)
    caplog.set_level("INFO", "jaxscale.perf")
    options = pipeline_speed.Options(
        schedules=["gpipe"],
        microbatches=[2, 4],
        num_steps=1,
        profiled=[],
        workdir=None,
        ends=math.inf,
    )
    words = ["--config", str(config_file), "--config.seq_len=32", TWO_LAYERS]
    record = pipeline_speed.measure(words, options, devices=jax.devices()[:2])
    assert list(record["runs"]) == ["gpipe_2", "gpipe_4"]
    (told,) = [each.message for each in caplog.records if each.message.startswith("so far")]
    assert [line.split()[0] for line in told.splitlines()] == ["so", "2", "run", "gpipe_2"]


def run_of(number: int, *seconds: float) -> dict[str, Any]:
    """Of gpipe's two stages."""
    return {
        "microbatches": number,
        "step_seconds": statistics.median(seconds),
        "all_step_seconds": list(seconds),
        "bubble_of_the_table": 1 / (number + 1),
    }


def profile_of(**seconds: float) -> dict[str, Any]:
    return {"seconds": {"loss": 0.0, "loss_gemm": 0.0, **seconds}}


def test_a_bubble_is_what_neither_microbatches_nor_the_optimizer_take():
    def run(number: int) -> dict[str, Any]:
        return run_of(number, 0.1 * (number + 1) + 0.05)

    runs = {"gpipe_8": run(8), "gpipe_32": run(32), "fsdp_8": run(2), "fsdp_32": run(8)}
    profiles = {"zb_h1": profile_of(optimizer=0.05), "fsdp": profile_of(optimizer=9.0)}
    found = pipeline_speed._with_bubbles(runs, profiles)
    assert list(found) == ["fsdp_8", "fsdp_32", "gpipe_8", "gpipe_32"]
    assert found["gpipe_8"]["bubble"] == pytest.approx(0.1 / 0.95)
    assert found["gpipe_32"]["bubble"] == pytest.approx(0.1 / 3.35)
    assert "bubble" not in found["fsdp_8"] and "bubble_expected" not in found["gpipe_8"]


def test_each_turn_gives_a_bubble_of_its_own():
    # 0.1, 0.2 and 0.12 s beside 0.1 a microbatch.
    runs = {"gpipe_8": run_of(8, 0.9, 1.0, 0.92), "gpipe_32": run_of(32, 3.3, 3.4, 3.32)}
    found = pipeline_speed._with_bubbles(runs, {})["gpipe_8"]
    assert found["microbatch_seconds"] == pytest.approx(0.1)
    shares = [found[f"bubble{which}"] for which in ("_min", "", "_max")]
    assert shares == pytest.approx([0.1 / 0.92, 0.12 / 0.92, 0.2 / 0.92])


def test_the_loss_is_no_part_of_the_bubble_that_is_expected():
    """Of 0.1 s a microbatch all stages spend 0.02 together, and wait one tick of 0.08."""
    runs = {f"gpipe_{number}": run_of(number, 0.1 * number + 0.08) for number in (8, 32)}
    profiles = {"gpipe": profile_of(optimizer=0.0, loss=0.04, loss_gemm=0.12)}
    for each in pipeline_speed._with_bubbles(runs, profiles).values():
        assert each["bubble_expected"] == pytest.approx(each["bubble"])
        assert each["bubble_expected"] == pytest.approx(0.08 / each["step_seconds"])


class Drifting:
    """A contest in which a second of updates makes those that follow 1% faster."""

    def __init__(self, *names: str):
        self.running = dict.fromkeys(names, self)
        self.spent = 0.0

    def num_microbatches(self) -> int:
        return 1

    def run(self, name: str, batches: list) -> float | None:
        assert len(batches) == 1
        if name == "broken_8":
            del self.running[name]
            return None
        at_first = 0.1 * (int(name.rpartition("_")[2]) + 1) + 0.05
        taken = at_first * (1 - 0.01 * (self.spent + at_first / 2))
        self.spent += taken
        return taken


def test_few_and_many_microbatches_take_turns_so_that_what_drifts_is_no_bubble():
    names = ["gpipe_8", "gpipe_32"]
    contest: Any = Drifting(*names, "broken_8")
    batches: Any = {1: [None] * 3}
    seconds = pipeline_speed._in_turns(contest, names, batches=batches)
    assert {name: len(times) for name, times in seconds.items()} == {"gpipe_8": 2, "gpipe_32": 2}
    runs = {
        name: run_of(number, *seconds[name]) for name, number in zip(names, (8, 32), strict=True)
    }
    found = pipeline_speed._with_bubbles(runs, {"gpipe": profile_of(optimizer=0.05)})
    # One after the other it is 0.19 instead.
    assert found["gpipe_8"]["bubble"] == pytest.approx(0.1 / 0.95, rel=0.05)
    assert not pipeline_speed._in_turns(contest, ["broken_8"], batches=batches)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--schedules=zb_h2"], "--schedules=zb_h2 is not one of fsdp, interleaved_4"),
        (["--microbatches=8"], "--microbatches: name two numbers, such as 8,32"),
        (["--microbatches=8,some"], "--microbatches='some': write numbers of 1 and more"),
        (["--profile=gpipe"], "--profile writes to a folder: name one, --workdir=DIR"),
    ],
)
def test_a_mistake_is_told_before_anything_is_compiled(words, told, script, config_file, capsys):
    assert script.run("--config", config_file, *words) == 2
    output, errors = capsys.readouterr()
    assert output == "" and told in errors and "compiled" not in errors
