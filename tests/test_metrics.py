"""What is reported is true: MFU as counted by hand, times between completions, files that survive restarts."""

import io
import json
import logging
import struct
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import distributed
from jaxscale.metrics import meter as metrics
from jaxscale.metrics.meter import (
    ConsoleWriter,
    JsonlWriter,
    Meter,
    TensorBoardWriter,
    WandbWriter,
    Writers,
    open_writers,
)


def llama3_8b_flops_per_token(seq_len, attended):
    """By hand: 6 FLOPs per weight that multiplies a token, and QK^T and AV over `attended` keys, times 3."""
    attention = 4096 * 4096 * 2 + 4096 * 1024 * 2
    weights = 32 * (attention + 3 * 4096 * 14336) + 128256 * 4096
    return 6 * weights + 3 * 32 * 2 * 2 * 4096 * attended


def test_mfu_equals_the_figures_for_llama_3_8b_by_both_rules():
    full = llama3_8b_flops_per_token(8192, attended=8192)
    causal = llama3_8b_flops_per_token(8192, attended=4096)
    assert (round(full / 1e9, 1), round(causal / 1e9, 1)) == (57.9, 51.5)
    peak = metrics.peak_flops("NVIDIA H100 80GB HBM3")
    assert f"{metrics.mfu(9931, full, peak):.1%}" == "58.2%"
    assert f"{metrics.mfu(9931, causal, peak):.1%}" == "51.7%"
    assert metrics.mfu(9931, full, None) is None


@pytest.mark.parametrize(
    "kind, peak",
    [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 NVL", 835e12), ("NVIDIA H200", 989e12),
     ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA H20", 148e12), ("NVIDIA GB200", 2500e12), ("cpu", None), ("", None)],
)  # fmt: skip
def test_the_peak_is_found_by_the_longest_name_in_the_device_kind(kind, peak):
    assert metrics.peak_flops(kind) == peak


def fake_device(in_use=0, peak=0, kind="NVIDIA H100 80GB HBM3"):
    return types.SimpleNamespace(
        device_kind=kind, memory_stats=lambda: {"bytes_in_use": in_use, "peak_bytes_in_use": peak}
    )


def test_memory_is_that_of_the_fullest_device_and_unknown_on_a_cpu():
    assert metrics.memory_gib(
        [fake_device(2**30, 5 * 2**30), fake_device(3 * 2**30, 4 * 2**30)]
    ) == (3.0, 5.0)
    assert metrics.memory_gib(jax.local_devices()) is None


class FakeDevice:
    """Runs steps one after the other on a clock of its own; the host's clock goes on only when it waits for a step."""

    def __init__(self, step_seconds):
        self.step_seconds, self.now, self.busy_until, self.num_dispatched = (
            step_seconds,
            0.0,
            0.0,
            0,
        )
        self.reads: list[tuple[int, int]] = []

    def dispatch(self, value):
        self.busy_until = max(self.busy_until, self.now) + self.step_seconds
        self.num_dispatched += 1
        return FakeScalar(self, value, self.busy_until, self.num_dispatched)


class FakeScalar:
    def __init__(self, device, value, end, index):
        self.device, self.value, self.end, self.index, self.is_copying = (
            device,
            value,
            end,
            index,
            False,
        )

    def copy_to_host_async(self):
        self.is_copying = True

    def __array__(self, dtype=None, copy=None):
        assert self.is_copying, "the copy was not started ahead"
        self.device.reads.append((self.index, self.device.num_dispatched))
        self.device.now = max(self.device.now, self.end)
        return np.asarray(self.value)


def make_meter(clock, devices=None):
    return Meter(
        num_devices=4,
        tokens_per_step=4096,
        flops_per_token_full=60e9,
        flops_per_token_causal=50e9,
        devices=devices or [fake_device()],
        clock=clock,
    )


def test_scalars_are_read_one_step_late_and_times_are_between_completions():
    device = FakeDevice(step_seconds=2.0)
    meter, records = make_meter(lambda: device.now), []
    for step in range(1, 6):
        device.now += 0.25  # the host's own work: dispatch is far quicker than the step
        scalars = {
            "loss": device.dispatch(10.0 - step),
            "tokens": FakeScalar(device, 4000, device.busy_until, device.num_dispatched),
        }
        finished = meter.record(step, scalars, 0.125 * step)
        assert [record["step"] for record in finished] == ([step - 1] if step > 1 else [])
        records += finished
    records += meter.flush()
    assert meter.flush() == []
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert [record["loss"] for record in records] == [9.0, 8.0, 7.0, 6.0, 5.0]
    assert [record["data_wait_seconds"] for record in records] == [0.125, 0.25, 0.375, 0.5, 0.625]
    assert [record["step_seconds"] for record in records] == [2.25, 2.0, 2.0, 2.0, 2.0]
    # All but the last were read with the next step already dispatched: the device never waited.
    assert all(dispatched == index + 1 for index, dispatched in device.reads if index < 5)
    assert device.now == 0.25 + 5 * 2.0
    assert records[-1] == {
        "step": 5,
        "loss": 5.0,
        "tokens": 4000,
        "step_seconds": 2.0,
        "data_wait_seconds": 0.625,
        "tokens_per_second_per_device": 512.0,
        "mfu_full": 512 * 60e9 / 989e12,
        "mfu_causal": 512 * 50e9 / 989e12,
        "live_memory_gib": 0.0,
        "peak_memory_gib": 0.0,
    }


def test_a_restart_leaves_an_evaluation_out_of_the_next_step():
    device = FakeDevice(step_seconds=2.0)
    meter = make_meter(lambda: device.now)
    meter.record(1, {"tokens": device.dispatch(8)}, 0.0)
    meter.flush()
    device.now += 100.0
    meter.restart()
    meter.record(2, {"tokens": device.dispatch(8)}, 0.0)
    assert meter.flush()[0]["step_seconds"] == 2.0


def test_a_meter_of_real_arrays_on_a_cpu_omits_mfu_and_memory():
    meter = make_meter(time.perf_counter, devices=jax.local_devices())
    step = jax.jit(lambda x: {"loss": jnp.sum(x), "tokens": jnp.int32(32)})
    records = []
    for index in range(3):
        records += meter.record(index, step(jnp.full((8,), index, jnp.float32)), 0.0)
    records += meter.flush()
    assert [record["loss"] for record in records] == [0.0, 8.0, 16.0]
    assert all(record["step_seconds"] > 0 and type(record["tokens"]) is int for record in records)
    assert not {"mfu_full", "mfu_causal", "live_memory_gib", "peak_memory_gib"} & set(records[0])


def test_recording_a_step_does_not_wait_for_it():
    def slow(
        x,
    ):  # some 0.3 s on one core; a host callback will not do, the CPU backend runs it before dispatch returns
        x = jax.lax.fori_loop(0, 100, lambda _, y: jnp.tanh(y @ x), x)
        return {"loss": jnp.sum(x), "tokens": jnp.int32(32)}

    x = jnp.full((512, 512), 1e-3, jnp.float32)
    step = jax.jit(slow).lower(x).compile()
    meter = make_meter(time.perf_counter, devices=jax.local_devices())
    begin = time.perf_counter()
    assert meter.record(1, step(x), 0.0) == []
    recorded = time.perf_counter()
    meter.flush()
    assert recorded - begin < 0.2 * (time.perf_counter() - begin)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def write_steps(writer, clock, num_steps, seconds=1.0):
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


def test_a_console_that_is_no_terminal_gets_a_plain_line_now_and_then_with_the_first_and_last_step():
    stream, clock = io.StringIO(), Clock()
    writer = ConsoleWriter(25, stream=stream, every_seconds=10, clock=clock)
    write_steps(writer, clock, 25)
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
    write_steps(writer, clock, 2)
    writer.write({"step": 2, "eval_loss": 2.25})
    write_steps(writer, clock, 4)
    writer.close()
    text = stream.getvalue()
    assert text.startswith("\r[#####...............] step 1/4  loss 2.5000")
    assert "\rstep 2  eval_loss 2.25\x1b[K\n" in text
    assert text.count("\n") == 2 and text.endswith("\x1b[K\n")
    for frame in text.replace("\n", "").replace("\x1b[K", "").split("\r"):
        assert len(frame) < 60


def test_a_terminal_is_not_redrawn_for_every_quick_step():
    stream, clock = Terminal(), Clock()
    write_steps(ConsoleWriter(1000, stream=stream, clock=clock), clock, 1000, seconds=0.001)
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
    path.write_text('{"step": 1}\n{"step": 2}\n')

    def killed(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(metrics.os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        JsonlWriter(path, resume_step=1)
    assert [record["step"] for record in read_jsonl(path)] == [1, 2]


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
