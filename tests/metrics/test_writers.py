"""Records stay valid and whole through restarts, full disks and writers that fail."""

import io
import json
import logging
import os
import struct
import sys
import types

import numpy as np
import pytest

from jaxscale import distributed
from jaxscale.metrics.writers import (
    ConsoleWriter,
    JsonlWriter,
    TensorBoardWriter,
    WandbWriter,
    Writers,
    open_writers,
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def write_steps(writer, clock, *, num_steps, seconds=1.0):
    for step in range(1, num_steps + 1):
        clock.now += seconds
        writer.write(
            {
                "step": step,
                "loss": 2.5,
                "tokens_per_second_per_device": 12345.6,
                "mfu_full": 0.5,
                "mfu_causal": 0.4,
            }
        )


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_without_a_terminal_a_plain_line_comes_now_and_then_and_for_the_first_and_last_step():
    stream, clock = io.StringIO(), Clock()
    writer = ConsoleWriter(25, stream=stream, every_seconds=10, clock=clock)
    write_steps(writer, clock, num_steps=25)
    writer.close()
    lines = stream.getvalue().splitlines()
    assert (
        lines[0] == "step  1/25  loss 2.5000  12,346 tokens/s/device  MFU 50.0% full, 40.0% causal"
    )
    assert [line.split()[1] for line in lines] == ["1/25", "11/25", "21/25", "25/25"]
    assert lines[1].endswith("ETA 0:00:14") and lines[-1].endswith("ETA 0:00:00")
    assert "\r" not in stream.getvalue() and "\x1b" not in stream.getvalue()


def test_a_terminal_gets_one_live_line_that_fits_and_makes_room_for_an_evaluation(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    stream, clock = Terminal(), Clock()
    writer = ConsoleWriter(4, stream=stream, clock=clock)
    write_steps(writer, clock, num_steps=2)
    writer.write({"step": 2, "eval_loss": 2.25})
    write_steps(writer, clock, num_steps=4)
    writer.close()
    text = stream.getvalue()
    assert text.startswith("\r[#####...............] step 1/4  loss 2.5000")
    assert "\rstep 2  eval_loss 2.25\x1b[K\n" in text
    assert text.count("\n") == 2 and text.endswith("\x1b[K\n")
    for frame in text.replace("\n", "").replace("\x1b[K", "").split("\r"):
        assert len(frame) < 60


def test_a_terminal_is_not_redrawn_for_every_quick_step():
    stream, clock = Terminal(), Clock()
    writer = ConsoleWriter(1000, stream=stream, clock=clock)
    write_steps(writer, clock, num_steps=1000, seconds=0.001)
    assert 10 <= stream.getvalue().count("\r") <= 12


def read_jsonl(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_jsonl_drops_the_records_after_the_step_resumed_from_and_a_half_written_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path, resume_step=0)
    for step in range(1, 8):
        writer.write({"step": step, "loss": 1 / step})
        assert read_jsonl(path)[-1] == {"step": step, "loss": 1 / step}, (
            "a line must be in the file at once"
        )
    writer.close()
    with open(path, "ab") as file:
        file.write(b'{"step": 8, "lo')
    writer = JsonlWriter(path, resume_step=5)
    for step in (6, 7):
        writer.write({"step": step, "loss": 0.0})
    writer.close()
    assert [(r["step"], r["loss"]) for r in read_jsonl(path)] == [
        (s, 1 / s) for s in range(1, 6)
    ] + [
        (6, 0.0),
        (7, 0.0),
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_file_stays_as_it_was_when_trimming_it_is_cut_short(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n')

    def killed(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        JsonlWriter(path, resume_step=1)
    assert [record["step"] for record in read_jsonl(path)] == [0, 1, 2]


# What metrics.jsonl held, the step that a run goes on from, and the steps that stay in it.
FOREIGN = {
    "of another run, at a fresh start": (b'{"step": 0}\n{"step": 7, "loss": 1.0}\n', 0, []),
    "binary": (bytes(range(256)) * 9, 3, []),
    "of other records": (b'{"epoch": 3}\n[1]\n"step"\n7\n{"step": "a"}\n', 3, []),
    "text between": (b'{"step": 1}\nhello\n{"step": 2}\n{"step": 9}\n', 3, [1, 2]),
    "lists without end": (b"[" * 100_000 + b"\n", 3, []),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_no_record_of_this_run_is_kept_beside(tmp_path, caplog, kind):
    held, step, steps = FOREIGN[kind]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(held)
    writer = JsonlWriter(path, resume_step=step)
    writer.write({"step": step + 1})
    writer.close()
    assert [record["step"] for record in read_jsonl(path)] == [*steps, step + 1]
    assert (tmp_path / "metrics.jsonl.old").read_bytes() == held
    assert "they are in metrics.jsonl.old now" in caplog.text


def test_where_nothing_can_be_written_each_place_costs_one_line_and_training_goes_on(
    tmp_path, monkeypatch, caplog, capsys
):
    class UsageError(Exception):
        pass

    def init(**options):
        raise UsageError("No API key configured.\nUse `wandb login`")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "tensorboard").write_text("a file")
    writers = open_writers(tmp_path, num_steps=2, resume_step=0, wandb_project="p")
    for step in (1, 2):
        writers.write({"step": step, "loss": 2.0})
    writers.close()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    for line, start, reason in zip(
        lines,
        ("no metrics.jsonl: IsADirectoryError", "no TensorBoard files: ", "no Weights & Biases: "),
        (
            "Is a directory",
            "Not a directory",
            "UsageError: No API key configured. Use `wandb login`",
        ),
        strict=True,
    ):
        assert line.startswith(start) and reason in line
        assert line.endswith("; training goes on without it")
    assert capsys.readouterr().out.count("loss 2.0000") == 2


def test_values_that_are_not_finite_stay_valid_json_and_are_named(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl", resume_step=0)
    writer.write(
        {"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "learning_rate": 1e-3}
    )
    writer.close()
    (record,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert record == {
        "step": 1,
        "loss": None,
        "grad_norm": None,
        "learning_rate": 1e-3,
        "non_finite": {"loss": "nan", "grad_norm": "inf"},
    }


def test_a_line_that_a_full_disk_cut_does_not_swallow_the_next_record(tmp_path, monkeypatch):
    class FullDisk(io.FileIO):
        is_full = True

        def write(self, data):
            if self.is_full:
                super().write(data[:6])
                raise OSError(28, "No space left on device")
            return super().write(data)

    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path, resume_step=0)
    writer.close()
    monkeypatch.setattr(writer, "_file", FullDisk(path, "ab"))
    with pytest.raises(OSError):
        writer.write({"step": 1})
    FullDisk.is_full = False
    writer.write({"step": 2})
    writer.close()
    assert path.read_text().splitlines() == ['{"step', '{"step": 2}']
    JsonlWriter(path, resume_step=2).close()
    assert read_jsonl(path) == [{"step": 2}]


def read_events(folder):
    """(tag, step, value) of every scalar in TFRecord files: length, CRC, an Event protobuf, CRC."""
    from tensorboardX.proto.event_pb2 import Event

    scalars = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            scalars += [
                (value.tag, event.step, value.simple_value) for value in event.summary.value
            ]
    return scalars


def test_tensorboard_files_hold_every_number(tmp_path):
    writer = TensorBoardWriter(tmp_path, resume_step=0)
    writer.write({"step": 1, "loss": 2.5, "tokens": 4096})
    writer.write({"step": 2, "loss": float("nan"), "note": "not a number"})
    writer.close()
    assert read_events(tmp_path)[:2] == [("loss", 1, 2.5), ("tokens", 1, 4096.0)]
    (tag, step, value) = read_events(tmp_path)[2]
    assert (tag, step) == ("loss", 2) and np.isnan(value) and len(read_events(tmp_path)) == 3


def test_an_absent_package_costs_one_line_that_says_how_to_install_it(
    tmp_path, monkeypatch, caplog, capsys
):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    writers = open_writers(tmp_path, num_steps=1, resume_step=0, wandb_project="p")
    writers.write({"step": 1, "loss": 2.0})
    writers.close()
    assert [record.getMessage() for record in caplog.records] == [
        "no TensorBoard files: tensorboardX is not installed; pip install tensorboardX",
        "no Weights & Biases: wandb is not installed; pip install wandb",
    ]
    assert capsys.readouterr().out == "step 1/1  loss 2.0000\n"
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.0}]


def test_wandb_goes_on_under_the_same_run_id(tmp_path, monkeypatch):
    started, logged, finished = [], [], []

    def init(**kwargs):
        started.append(kwargs)
        return types.SimpleNamespace(
            log=lambda values, step: logged.append((step, values)),
            finish=lambda: finished.append(True),
        )

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    for _ in range(2):
        writer = WandbWriter("project", folder=tmp_path, run_config={"steps": 3})
        writer.write({"step": 1, "loss": 2.0})
        writer.close()
    assert (
        started[0] == started[1]
        and started[0]["resume"] == "allow"
        and started[0]["config"] == {"steps": 3}
    )
    assert logged == [(1, {"loss": 2.0})] * 2 and finished == [True, True]


def test_a_writer_that_fails_is_reported_once_and_the_others_go_on(tmp_path, caplog):
    class Broken:
        def write(self, record):
            raise OSError("disk full")

        def close(self):
            raise OSError("still full")

    writers = Writers([Broken(), JsonlWriter(tmp_path / "metrics.jsonl", resume_step=0)])
    for step in (1, 2):
        writers.write({"step": step})
    writers.close()
    assert [r.getMessage() for r in caplog.records] == [
        "Broken failed, training goes on without it: OSError: disk full"
    ]
    assert caplog.records[0].levelno == logging.ERROR
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 2


def test_only_the_lead_process_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(distributed, "is_lead", lambda: False)
    writers = open_writers(tmp_path / "workdir", num_steps=1, resume_step=0, wandb_project="p")
    writers.write({"step": 1, "loss": 2.0})
    writers.close()
    assert capsys.readouterr().out == "" and not (tmp_path / "workdir").exists()
