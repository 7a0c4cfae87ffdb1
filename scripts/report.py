"""Summarises runs: python scripts/report.py runs/a/metrics.jsonl [runs/b/metrics.jsonl ...] [--skip=10]

One line and one JSON record a run: medians over the steps after the first --skip but the last (jaxscale/bench.py says
why), the first step, and what its record says of the compilation before it.
"""

import json
from pathlib import Path

from absl import app, flags

from jaxscale.perf import bench

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
        steps = bench.steps_of(records)
        if len(steps) <= SKIP.value + 1:
            print(
                f"error: {path} has {len(steps)} steps, of which --skip={SKIP.value} and the last leave none"
            )
            return 2
        report = bench.summarize(steps, SKIP.value)
        report |= {
            key: steps[0][key]
            for key in ("compile_seconds", "predicted_memory_gib")
            if key in steps[0]
        }
        print(f"{path}: " + ", ".join(f"{key} {value:,.6g}" for key, value in report.items()))
        print(json.dumps({"run": path} | report))
    return None


if __name__ == "__main__":
    app.run(main)
