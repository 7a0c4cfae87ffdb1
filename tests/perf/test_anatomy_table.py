"""Anatomies as text, as a picture and as JSON, and the script that makes them."""

import dataclasses
import json
import re
import sys

import pytest

from jaxscale.perf.anatomy import anatomy
from jaxscale.perf.anatomy_plot import plot
from jaxscale.perf.anatomy_table import table
from jaxscale.perf.trace import Trace, read
from tests.perf.scripts import Script
from tests.perf.traces import events_of, steps


def rows(text):
    """{label: numbers} of the table's first part."""
    return {
        match[1].strip(): [
            float(x) for x in re.findall(r"[+-]?[\d,]+\.\d+", match[2].replace(",", ""))
        ]
        for match in re.finditer(r"^(\D{29,30}?)((?: *[+-]?[\d,.]+%?)+)$", text, re.MULTILINE)
    }


def test_two_traces_stand_side_by_side_with_their_difference():
    slow = [dataclasses.replace(x, start=x.start * 10**6, end=x.end * 10**6) for x in steps(3)]
    fast = [
        dataclasses.replace(x, start=x.start * 10**6 // 2, end=x.end * 10**6 // 2) for x in steps(3)
    ]
    text = table(
        [anatomy(Trace(name, {0: events_of(x)}, {})) for name, x in (("a", slow), ("b", fast))],
        top=2,
    )
    found = rows(text)
    assert found["matrix products"] == [300, 30, 150, 30, -150, -50]
    assert found["the step"] == [1000, 100, 500, 100, -500, -50]
    assert found["embedding"] == [0, 0, 0, 0, 0]
    assert "[1] a: jit_train_step on GPU 0 of 1, 3 steps of 1,000.00 to 1,000.00 ms" in text
    assert text.count("nvjet_sm90_tst_256x128") == 2  # --top lines of each


def test_a_picture_shows_every_trace_and_category(trace_file, tmp_path):
    from matplotlib import image

    trace = read(trace_file)
    plot(anatomy(trace), tmp_path / "one.png")
    plot([anatomy(trace), anatomy(trace, 0)], tmp_path / "two.png")
    one, two = (image.imread(tmp_path / f"{name}.png") for name in ("one", "two"))
    assert two.shape[1] > one.shape[1]
    colors = {
        tuple(color) for color in (one[..., :3].reshape(-1, 3) * 255).round().astype(int).tolist()
    }
    assert {(31, 119, 180), (255, 127, 14), (44, 160, 44)} <= colors  # matplotlib's first three


def test_without_matplotlib_a_picture_is_refused_with_what_to_install(
    trace_file, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxscale\[plot\]'"):
        plot(anatomy(read(trace_file)), tmp_path / "x.png")


@pytest.fixture(scope="module")
def script():
    return Script("anatomy")


def test_the_script_prints_a_table_and_draws(script, trace_file, tmp_path, capsys):
    png = tmp_path / "x.png"
    folder = trace_file.parents[2]
    code = script.run(folder, trace_file, "--top=3", "--device=0", f"--png={png}")
    output, errors = capsys.readouterr()
    assert code == 0, errors
    assert "reduce-scatter" in output and "[2] - [1] ms" in output
    assert png.read_bytes().startswith(b"\x89PNG")


def test_the_script_prints_json(script, trace_file, capsys):
    assert script.run(trace_file, "--json", "--top=2") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["exposed_communication_share"] == pytest.approx(0.1)
    assert sum(record["seconds"].values()) == pytest.approx(record["step_seconds"])
    assert len(record["kernels"]) == 2


@pytest.mark.parametrize(
    "arguments", [[], ["absent"], ["--device=7"]], ids=["none", "absent", "device"]
)
def test_the_script_tells_a_mistake_in_one_line(script, trace_file, arguments, capsys):
    assert script.run(*arguments, *[trace_file] * ("--device=7" in arguments)) == 2
    output, errors = capsys.readouterr()
    assert re.fullmatch(r"\nerror: .+\n", errors)
    assert output == ""
