"""The clock and counters of a run's steps: step time, tokens/s, MFU and memory.

    meter = Meter(num_devices=..., tokens_per_step=..., devices=jax.local_devices(), ...)
    for step in ...:
        state, device_metrics = update(state, batch)
        # The records of the steps that have finished.
        records = meter.record(step, device_metrics, data_wait_seconds=...)
    records = meter.flush()

A record is a flat dict of numbers: step and the scalars that the update returned (loss, grad_norm,
learning_rate, tokens: those that counted in the loss), then step_seconds, data_wait_seconds,
tokens_per_second_per_device, and where they are known mfu_full, mfu_causal, live_memory_gib,
peak_memory_gib. MFU on a CPU is left out, not made up. The caller adds what it knows: the first
record of a run also has compile_seconds and predicted_memory_gib (`compile/fit.py`).
"""

import collections
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

# Dense bf16 FLOP/s without sparsity, from the makers' data sheets; by a part of the device's kind.
PEAK_FLOPS = {
    "A100": 312e12,
    "H20": 148e12,
    "H100": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H200": 989e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "L40S": 362e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 FLOP/s of a `jax.Device.device_kind`; None if unknown, such as for a CPU."""
    # The longest name first: `H200` holds `H20`, and `H100 PCIe` holds `H100`.
    names = sorted((name for name in PEAK_FLOPS if name in device_kind), key=len)
    return PEAK_FLOPS[names[-1]] if names else None


def mfu(
    tokens_per_second_per_device: float, flops_per_token: float, *, peak: float | None
) -> float | None:
    """Model FLOPs utilisation as a fraction (PaLM, appendix B).

    flops_per_token: of forward and backward without recomputation, by one of two rules: mfu_full
    counts attention over the whole sequence square, as torchtitan prints; mfu_causal the half below
    the diagonal, which has to run. peak: the device's FLOP/s; MFU is None where that is not known.
    """
    return None if peak is None else tokens_per_second_per_device * flops_per_token / peak


def memory_gib(devices: Iterable[jax.Device]) -> tuple[float, float] | None:
    """GiB in use and their peak since the start, of the fullest device; None on a CPU."""
    stats = [device.memory_stats() for device in devices]
    if not stats or not all(stats):
        return None
    in_use = max(stat["bytes_in_use"] for stat in stats)
    peak = max(stat["peak_bytes_in_use"] for stat in stats)
    return in_use / 2**30, peak / 2**30


class Meter:
    """Turns the device scalars of each step into a record, one step late.

    The scalars of step n are read after step n+1 has been dispatched: while the host waits for
    them the device has the next step to do. The moment they arrive is when step n ended, and
    step_seconds is the time between two such moments. (With CUDA_DEVICE_MAX_CONNECTIONS=1 and
    several GPUs they arrive behind the launches of step n+1, each as late.)
    """

    def __init__(
        self,
        *,
        num_devices: int,
        tokens_per_step: int,
        flops_per_token_full: float,
        flops_per_token_causal: float,
        devices: Sequence[jax.Device],
        clock: Callable[[], float] = time.perf_counter,
    ):
        """num_devices: of the whole run. devices: the local ones, for peak FLOP/s and memory.

        tokens_per_step: rows times their length, whether a token counts in the loss or not, as
        peers count. The clock starts here: the first step_seconds has all that comes between this
        and the end of the first step.
        """
        self._num_devices = num_devices
        self._tokens_per_step = tokens_per_step
        self._flops_per_token_full = flops_per_token_full
        self._flops_per_token_causal = flops_per_token_causal
        self._devices = devices
        self._peak_flops = peak_flops(devices[0].device_kind)
        self._clock = clock
        self._pending: collections.deque[tuple[int, dict[str, jax.Array], float]] = (
            collections.deque()
        )
        self._last_end = clock()

    def record(
        self, step: int, device_metrics: dict[str, jax.Array], *, data_wait_seconds: float
    ) -> list[dict[str, Any]]:
        """Takes the scalars of the step just dispatched; returns the record of the step before.

        Empty for the first step. device_metrics: 0-d arrays. Waits for the step before this one.
        Every process calls it; all get the same values, but each its own times and memory.
        """
        for value in device_metrics.values():
            value.copy_to_host_async()
        self._pending.append((step, device_metrics, data_wait_seconds))
        return [self._finish() for _ in range(len(self._pending) - 1)]

    def flush(self) -> list[dict[str, Any]]:
        """The record still outstanding; waits for the device.

        Call before anything that is no part of a step, and at the end of the run.
        """
        return [self._finish() for _ in range(len(self._pending))]

    def restart(self) -> None:
        """Starts the clock anew: what was done since flush() is no part of a step's time."""
        assert not self._pending, "flush() first"
        self._last_end = self._clock()

    def _finish(self) -> dict[str, Any]:
        step, device_metrics, data_wait_seconds = self._pending.popleft()
        # Waits for the step.
        values = {name: np.asarray(value).item() for name, value in device_metrics.items()}
        end = self._clock()
        step_seconds, self._last_end = end - self._last_end, end
        rate = self._tokens_per_step / step_seconds / self._num_devices
        record = {
            "step": step,
            **values,
            "step_seconds": step_seconds,
            "data_wait_seconds": data_wait_seconds,
            "tokens_per_second_per_device": rate,
        }
        if (peak := self._peak_flops) is not None:
            record["mfu_full"] = mfu(rate, self._flops_per_token_full, peak=peak)
            record["mfu_causal"] = mfu(rate, self._flops_per_token_causal, peak=peak)
        if (memory := memory_gib(self._devices)) is not None:
            record["live_memory_gib"], record["peak_memory_gib"] = memory
        return record
