"""What is measured is true: MFU as counted by hand, and times between the ends of steps."""

import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.metrics.meter import Meter, memory_gib, mfu, peak_flops


def llama3_8b_flops_per_token(seq_len, attended):
    """By hand: 6 FLOPs for each weight that multiplies a token, and attention.

    Its QK^T and AV over `attended` keys run once forward and twice backward.
    """
    attention = 4096 * 4096 * 2 + 4096 * 1024 * 2
    weights = 32 * (attention + 3 * 4096 * 14336) + 128256 * 4096
    return 6 * weights + 3 * 32 * 2 * 2 * 4096 * attended


def test_mfu_equals_the_figures_for_llama_3_8b_by_both_rules():
    full = llama3_8b_flops_per_token(8192, attended=8192)
    causal = llama3_8b_flops_per_token(8192, attended=4096)
    assert (round(full / 1e9, 1), round(causal / 1e9, 1)) == (57.9, 51.5)
    peak = peak_flops("NVIDIA H100 80GB HBM3")
    assert f"{mfu(9931, full, peak=peak):.1%}" == "58.2%"
    assert f"{mfu(9931, causal, peak=peak):.1%}" == "51.7%"
    assert mfu(9931, full, peak=None) is None


@pytest.mark.parametrize(
    "kind, peak",
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA GB200", 2500e12),
        ("cpu", None),
        ("", None),
    ],
)
def test_the_peak_is_found_by_the_longest_name_in_the_device_kind(kind, peak):
    assert peak_flops(kind) == peak


def fake_device(in_use=0, peak=0, kind="NVIDIA H100 80GB HBM3"):
    return types.SimpleNamespace(
        device_kind=kind, memory_stats=lambda: {"bytes_in_use": in_use, "peak_bytes_in_use": peak}
    )


def test_memory_is_that_of_the_fullest_device_and_unknown_on_a_cpu():
    assert memory_gib([fake_device(2**30, 5 * 2**30), fake_device(3 * 2**30, 4 * 2**30)]) == (
        3.0,
        5.0,
    )
    assert memory_gib(jax.local_devices()) is None


class FakeDevice:
    """Runs steps one after the other on a clock of its own.

    The host's clock goes on only when it waits for a step.
    """

    def __init__(self, step_seconds):
        self.step_seconds, self.num_dispatched = step_seconds, 0
        self.now = self.busy_until = 0.0
        self.reads: list[tuple[int, int]] = []

    def dispatch(self, value):
        self.busy_until = max(self.busy_until, self.now) + self.step_seconds
        self.num_dispatched += 1
        return FakeScalar(self, value)


class FakeScalar:
    """A result of the step that the device dispatched last."""

    def __init__(self, device, value):
        self.device, self.value, self.is_copying = device, value, False
        self.end, self.index = device.busy_until, device.num_dispatched

    def copy_to_host_async(self):
        self.is_copying = True

    def __array__(self, dtype=None, copy=None):
        assert self.is_copying, "the copy was not started ahead"
        self.device.reads.append((self.index, self.device.num_dispatched))
        self.device.now = max(self.device.now, self.end)
        return np.asarray(self.value)


def make_meter(clock, *, devices=None):
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
            "tokens": FakeScalar(device, 4000),
        }
        finished = meter.record(step, scalars, data_wait_seconds=0.125 * step)
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
    meter.record(1, {"tokens": device.dispatch(8)}, data_wait_seconds=0.0)
    meter.flush()
    device.now += 100.0
    meter.restart()
    meter.record(2, {"tokens": device.dispatch(8)}, data_wait_seconds=0.0)
    assert meter.flush()[0]["step_seconds"] == 2.0


def test_a_meter_of_real_arrays_on_a_cpu_omits_mfu_and_memory():
    meter = make_meter(time.perf_counter, devices=jax.local_devices())
    step = jax.jit(lambda x: {"loss": jnp.sum(x), "tokens": jnp.int32(32)})
    records = []
    for index in range(3):
        records += meter.record(
            index, step(jnp.full((8,), index, jnp.float32)), data_wait_seconds=0.0
        )
    records += meter.flush()
    assert [record["loss"] for record in records] == [0.0, 8.0, 16.0]
    assert all(record["step_seconds"] > 0 and type(record["tokens"]) is int for record in records)
    assert not {"mfu_full", "mfu_causal", "live_memory_gib", "peak_memory_gib"} & set(records[0])


def test_recording_a_step_does_not_wait_for_it():
    # Some 0.3 s on one core. A host callback will not do: a CPU runs it before dispatch returns.
    def slow(x):
        x = jax.lax.fori_loop(0, 100, lambda _, y: jnp.tanh(y @ x), x)
        return {"loss": jnp.sum(x), "tokens": jnp.int32(32)}

    x = jnp.full((512, 512), 1e-3, jnp.float32)
    step = jax.jit(slow).lower(x).compile()

    def is_recorded_before_it_is_done():
        meter, metrics = make_meter(time.perf_counter, devices=jax.local_devices()), step(x)
        assert meter.record(1, metrics, data_wait_seconds=0.0) == []
        was_running = not metrics["loss"].is_ready()
        meter.flush()
        return was_running

    # Once is proof. This process may be kept waiting for longer than a step takes, but not always.
    assert any(is_recorded_before_it_is_done() for _ in range(20))
