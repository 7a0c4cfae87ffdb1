"""A run goes on with other numbers of processes, and what it does is on record."""

import pytest

from jaxscale.perf import moved_runs
from jaxscale.perf.moved_runs import Options, Start
from tests.perf.scripts import Script

SETTINGS = (
    "--config.steps=400",
    "--config.schedule.warmup_steps=2",
    "--config.evaluation.batches=1",
    "--config.log.tensorboard=False",
    "--config.sample.tokens=0",
)


@pytest.mark.slow
def test_a_run_of_two_processes_goes_on_in_one(tmp_path, write_small_config):
    config = write_small_config(tmp_path, batch_size=8)
    options = Options(
        nums=(2, 1),
        settings=(f"--config={config}", *SETTINGS),
        folder=tmp_path / "runs",
        every=3,
        timeout_seconds=300,
    )
    options.folder.mkdir()
    first, second = moved_runs.starts(options)
    assert (first.num, first.resumed, first.restore_seconds) == (2, 0, None)
    assert (second.num, second.resumed) == (1, 3) and second.restore_seconds
    for start in (first, second):
        assert 0 <= start.gigabytes < 0.1 and 0 < start.stall_seconds < 10
        assert 0 <= start.written_seconds <= start.whole_seconds
    assert moved_runs.largest_difference(options, moved_runs.undisturbed(options)) < 1e-5


def test_a_start_is_told_in_a_line():
    start = Start(2, 8, 16.0, 96.0, 0.95, 42.0, 72.0, 0.811, 0.815)
    assert moved_runs.describe(start) == (
        "2 processes: went on from step 8, restored in 16.0 s (6.0 GB/s), a step takes 0.8110 s, "
        "beside the save 0.8150 s; saved 96.0 GB: the steps waited 0.95 s, written in 42.0 s "
        "(2.3 GB/s), in place after 72.0 s"
    )


@pytest.mark.parametrize(
    "words, said",
    [
        ("-n 2,0 --workdir=w -- --config=c", "2,0: write numbers of processes"),
        ("-n 2 --workdir=w --every=0 -- --config=c", "--every=0: 1 or more"),
        ("-n 2 --workdir=w -- config.py", "config.py: write --config=FILE first"),
    ],
)
def test_a_mistake_is_told_before_anything_runs(words, said, capsys, monkeypatch):
    script = Script("bench_checkpoint")
    monkeypatch.setattr("sys.argv", ["bench_checkpoint.py", *words.split()])
    with pytest.raises(SystemExit) as left:
        script.module.main()
    assert left.value.code == 2 and said in capsys.readouterr().err
