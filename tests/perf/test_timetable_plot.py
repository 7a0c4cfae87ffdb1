"""A timetable is printed and drawn by its script."""

import sys

import pytest

from jaxscale.config import PipelineSchedule
from jaxscale.parallel.schedules import Shape, timetable
from jaxscale.perf.timetable_plot import plot
from tests.perf.scripts import Script

INTERLEAVED = Shape(PipelineSchedule.INTERLEAVED, 2, 4, 2)


@pytest.mark.parametrize("is_lean", [False, True])
def test_ops_of_a_stage_do_not_overlap_and_end_with_the_bubble_of_the_table(is_lean):
    table = timetable(Shape(PipelineSchedule.ZB_H1, 4, 8, is_lean=is_lean))
    begin, lengths = table.times()
    assert (begin[1:] >= begin[:-1] + lengths[:-1] - 1e-9).all()
    share = lengths.sum() / (4 * (begin + lengths).max())
    assert share == pytest.approx(1 - table.bubble())


def test_it_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    plot(timetable(INTERLEAVED), tmp_path / "table.png")
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="jaxscale\\[plot\\]"):
        plot(timetable(INTERLEAVED), tmp_path / "table.png")


def test_the_script_prints_it_and_refuses_fewer_microbatches_than_stages(capsys):
    script = Script("explain_pipeline")
    assert script.run("--schedule=interleaved", "--stages=2", "--microbatches=4") == 0
    assert "interleaved x2: 2 stages, 4 microbatches" in capsys.readouterr().out
    assert script.run("--stages=4", "--microbatches=2") == 2
    assert "--microbatches=2 are fewer than --stages=4" in capsys.readouterr().err
