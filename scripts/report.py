"""Summarises runs: python scripts/report.py runs/a/metrics.jsonl [runs/b/metrics.jsonl ...]

One line and one JSON record a run: medians over the steps after the first --skip but the last
(jaxscale/perf/records.py says why), the first step, and what its record says of the compilation
before it.
"""

import json

from absl import app, flags

from jaxscale.command_line import EXIT_MISTAKE, parse_flags_and_words, tell
from jaxscale.perf import records

SKIP = flags.DEFINE_integer("skip", 10, "Steps at the start that no median counts.", lower_bound=0)


def main(argv: list[str]) -> int | None:
    if len(argv) < 2:
        return tell(ValueError("name at least one metrics.jsonl"), EXIT_MISTAKE)
    for path in argv[1:]:
        try:
            summary = records.summarize_file(path, skip=SKIP.value)
        except ValueError as error:
            return tell(error, EXIT_MISTAKE)
        print(f"{path}: " + ", ".join(f"{key} {value:,.6g}" for key, value in summary.items()))
        print(json.dumps({"run": path} | summary))
    return None


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags_and_words)
