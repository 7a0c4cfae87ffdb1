"""Summarises runs: python scripts/report.py runs/a/metrics.jsonl [runs/b/metrics.jsonl ...] [--skip=10]

One line and one JSON record a run: medians over the steps after the first --skip, and the first step, which holds the
compilation as well. The last step is left out: nothing is dispatched after it, so the host notices its end sooner, and
its time comes out short by the host's lag.
"""

import json
import statistics
from pathlib import Path

from absl import app, flags

SKIP = flags.DEFINE_integer("skip", 10, "Steps at the start that no median counts.")


def main(argv: list[str]) -> int | None:
    if len(argv) < 2:
        print("error: name at least one metrics.jsonl")
        return 2
    for path in argv[1:]:
        try:
            records = [json.loads(line) for line in Path(path).read_text().splitlines()]
        except (OSError, ValueError) as error:
            print(f"error: {path}: {error}")
            return 2
        steps = [record for record in records if "step_seconds" in record]
        if len(steps) <= SKIP.value + 1:
            print(f"error: {path} has {len(steps)} steps, of which --skip={SKIP.value} and the last leave none")
            return 2
        report = summarize(steps, SKIP.value)
        print(f"{path}: " + ", ".join(f"{key} {value:,.6g}" for key, value in report.items()))
        print(json.dumps({"run": path} | report))
    return None


def summarize(steps: list[dict], skip: int) -> dict[str, float]:
    """Medians of the steps after `skip` but the last; the spread of the rate; the share of a step spent waiting for data."""
    counted = steps[skip:-1]

    def median(key):
        return statistics.median(record[key] for record in counted)

    rates = [record["tokens_per_second_per_device"] for record in counted]
    report = {
        "tokens_per_second_per_device": median("tokens_per_second_per_device"),
        "min": min(rates),
        "max": max(rates),
        "step_seconds": median("step_seconds"),
        "first_step_seconds": steps[0]["step_seconds"],
        "data_wait_share": median("data_wait_seconds") / median("step_seconds"),
    }
    for key in ("mfu_full", "mfu_causal", "peak_memory_gib"):
        if key in steps[-1]:
            report[key] = median(key)
    return report | {"first_loss": steps[0]["loss"], "last_loss": steps[-1]["loss"], "steps": len(steps)}


if __name__ == "__main__":
    app.run(main)
