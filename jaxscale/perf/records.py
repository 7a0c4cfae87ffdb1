"""A run's metrics.jsonl: its records, and medians of its steps."""

import json
import statistics
from pathlib import Path
from typing import Any

Record = dict[str, Any]

RATE = "tokens_per_second_per_device"


def read_records(path: Path) -> list[Record]:
    """The records of a file that may still be written to; none if it is not there yet."""
    try:
        lines = path.read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def steps_of(records: list[Record]) -> list[Record]:
    """The records of training steps, without those of evaluations and the like."""
    return [record for record in records if "step_seconds" in record]


def summarize(steps: list[Record], *, skip: int) -> dict[str, float]:
    """Medians of the steps after `skip` but the last; `min` and `max` are of the rate.

    Nothing is dispatched after the last step (of a run, or before a pause), so the host notices its
    end sooner, and its time comes out short by the host's lag.
    """
    counted = steps[skip:-1]

    def median(key: str) -> float:
        return statistics.median(record[key] for record in counted)

    rates = [record[RATE] for record in counted]
    optional = [key for key in ("mfu_full", "mfu_causal", "peak_memory_gib") if key in steps[-1]]
    return {
        RATE: median(RATE),
        "min": min(rates),
        "max": max(rates),
        "step_seconds": median("step_seconds"),
        "first_step_seconds": steps[0]["step_seconds"],
        "data_wait_share": median("data_wait_seconds") / median("step_seconds"),
        **{key: median(key) for key in optional},
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "steps": len(steps),
    }


def summarize_file(path: str | Path, *, skip: int) -> dict[str, float]:
    """`summarize`, with what the run's first step says of the compilation before it.

    Raises ValueError for a file that holds no records, or too few steps.
    """
    try:
        steps = steps_of([json.loads(line) for line in Path(path).read_text().splitlines()])
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; name the metrics.jsonl of a run") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no metrics.jsonl of a run: {error}") from None
    if len(steps) <= skip + 1:
        raise ValueError(
            f"{path} has {len(steps)} steps, of which --skip={skip} and the last leave none; lower "
            "--skip"
        )
    keys = ("compile_seconds", "predicted_memory_gib")
    compilation = {key: steps[0][key] for key in keys if key in steps[0]}
    return summarize(steps, skip=skip) | compilation
