"""A process of a run is broken, named by the other, and the run goes on to the same losses."""

import pytest

from jaxscale.perf import broken_runs
from jaxscale.perf.broken_runs import Options, Trial

SETTINGS = (
    "--config.steps=8",
    "--config.schedule.warmup_steps=2",
    "--config.checkpoint.every=2",
    "--config.evaluation.batches=1",
    "--config.log.tensorboard=False",
    "--config.sample.tokens=0",
)


@pytest.mark.slow
def test_one_without_memory_is_named_with_its_words_and_the_run_goes_on(
    tmp_path, write_small_config
):
    config = write_small_config(tmp_path, batch_size=8)
    folder = tmp_path / "runs"
    folder.mkdir()
    options = Options(2, (f"--config={config}", *SETTINGS), folder, step=4, timeout_seconds=600)
    wanted = broken_runs.undisturbed(options)
    assert list(wanted) == list(range(1, 9))
    trial = broken_runs.try_fault("memory", 0, options=options, wanted=wanted)
    assert (
        trial.words.startswith("process 0 (host ") and "failed: RESOURCE_EXHAUSTED" in trial.words
    )
    assert trial.resumed in (2, 4) and trial.difference == 0
    assert 0 < trial.named_seconds <= trial.left_seconds < 60


def test_the_table_has_medians_and_worst():
    trials = [
        Trial("stop", 0, 4.0, 4.2, "words", 14, 10, 0.0),
        Trial("stop", 1, 5.0, 6.2, "words", 15, 10, 1e-6),
        Trial("kill", 1, 0.2, 0.3, "words", 14, 10, 0.0),
    ]
    assert broken_runs.table(trials).splitlines()[2:] == [
        "| stop | 2 | 4.5, 5.0 | 6.2 | 5 | 1.0e-06 |",
        "| kill | 1 | 0.2, 0.2 | 0.3 | 4 | 0.0e+00 |",
    ]
