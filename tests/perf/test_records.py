"""A run is summarised by the medians of the steps that count."""

import json

import pytest

from jaxscale.perf import records
from tests.perf.scripts import Script


def write(path, num_steps):
    """Steps of 1, 2, 3 ... seconds, of which the first took longer, with an evaluation between."""
    lines = [
        {
            "step": step,
            "step_seconds": float(step),
            "tokens_per_second_per_device": 60.0 / step,
            "data_wait_seconds": step / 10,
            "loss": 10.0 - step,
        }
        for step in range(1, num_steps + 1)
    ]
    lines[0] |= {"compile_seconds": 7.0, "predicted_memory_gib": 3.0}
    lines.insert(2, {"step": 2, "eval_loss": 5.0})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_first_steps_and_the_last_do_not_count(tmp_path):
    summary = records.summarize_file(write(tmp_path / "metrics.jsonl", 7), skip=2)
    # Steps 3 to 6: 20, 15, 12 and 10 tokens/s.
    assert summary["tokens_per_second_per_device"] == 13.5
    assert (summary["min"], summary["max"], summary["step_seconds"]) == (10.0, 20.0, 4.5)
    assert summary["data_wait_share"] == pytest.approx(0.1)
    assert (summary["first_loss"], summary["last_loss"], summary["steps"]) == (9.0, 3.0, 7)
    assert (summary["compile_seconds"], summary["predicted_memory_gib"]) == (7.0, 3.0)


def test_a_line_that_is_being_written_is_not_read_yet(tmp_path):
    path = write(tmp_path / "metrics.jsonl", 3)
    assert len(records.steps_of(records.read_records(path))) == 3
    path.write_text(path.read_text()[:-5])
    assert len(records.steps_of(records.read_records(path))) == 2
    assert records.read_records(tmp_path / "none.jsonl") == []


def test_a_report_has_a_line_and_a_record_of_each_run(tmp_path, capsys):
    paths = [write(tmp_path / f"{name}.jsonl", 14) for name in "ab"]
    assert Script("report").run(*paths) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[::2]] == list(map(str, paths))
    assert [json.loads(line)["run"] for line in lines[1::2]] == list(map(str, paths))
    assert json.loads(lines[1])["steps"] == 14


def test_a_report_says_of_which_run_there_is_nothing_to_report(tmp_path, capsys):
    short, broken = write(tmp_path / "short.jsonl", 11), tmp_path / "broken.jsonl"
    broken.write_text("hello")
    report = Script("report")
    for paths, told in (
        ([], "error: name at least one metrics.jsonl"),
        ([short], f"{short} has 11 steps, of which --skip=10 and the last leave none"),
        ([tmp_path / "none.jsonl"], "No such file"),
        ([broken], f"error: {broken} is no metrics.jsonl of a run"),
    ):
        assert report.run(*paths) == 2
        assert told in capsys.readouterr().err
