"""Losses of runs are compared and drawn by their script."""

import json
import sys

import pytest

from jaxscale.perf import loss_plot
from jaxscale.perf.records import read_records
from tests.perf.scripts import Script


@pytest.fixture
def runs(tmp_path):
    """Folders of two runs: the second a little worse, evaluated once less, one step skipped."""
    for name, more in (("a", 0.0), ("b", 0.05)):
        lines = [
            dict(step=step, step_seconds=1.0, loss=5.0 / step + more, skipped=int(step == 3))
            for step in range(1, 31)
        ]
        lines += [dict(step=step, eval_loss=5.0 / step + more) for step in (0 + 1, 10, 20)]
        if name == "a":
            lines = [line | dict(skipped=0) if "loss" in line else line for line in lines]
            lines.append(dict(step=30, eval_loss=0.1))
        (tmp_path / name).mkdir()
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    return [tmp_path / name for name in "ab"]


def test_the_last_common_held_out_loss_is_compared(runs, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    output = tmp_path / "losses.png"
    words = f"bf16={runs[0]}", f"fp8={runs[1]}", f"--output={output}"
    assert Script("compare_losses").run(*words) == 0
    assert capsys.readouterr().out.splitlines() == [
        "held-out loss at step 20, nats/token",
        "bf16  0.25000  +0.000%",
        "fp8   0.30000  +20.000%  1 steps skipped",
    ]
    assert output.read_bytes().startswith(b"\x89PNG")


def test_mistakes_are_told(runs, capsys, tmp_path):
    script = Script("compare_losses")
    for words, problem in (
        ((runs[0],), "name at least two runs"),
        ((f"x={runs[0]}", f"x={runs[1]}"), "two runs have one name"),
        ((runs[0], tmp_path / "none"), "none/metrics.jsonl holds no records"),
    ):
        assert script.run(*words) == 2
        assert problem in capsys.readouterr().err


def test_runs_that_were_never_evaluated_alike_are_told(runs):
    read = {str(run): read_records(run / "metrics.jsonl") for run in runs}
    read["none"] = [record for record in read[str(runs[0])] if "loss" in record]
    with pytest.raises(ValueError, match="no step was evaluated in all"):
        loss_plot.table(read)


def test_without_matplotlib_it_says_what_to_install(runs, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="jaxscale\\[plot\\]"):
        loss_plot.plot({}, tmp_path / "losses.png")
