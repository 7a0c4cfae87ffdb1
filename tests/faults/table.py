"""The table of docs/reliability.md: python tests/faults/table.py LOG, of `make test-faults`."""

import collections
import json
import statistics
import sys
from pathlib import Path


def main(path: str) -> None:
    trials = collections.defaultdict(list)
    for line in Path(path).read_text().splitlines():
        trial = json.loads(line)
        trials[trial["fault"]].append(trial)
    print("| fault | trials | survived | seconds to tell: median, most | steps done again |")
    print("|---|---|---|---|---|")
    for fault, found in trials.items():
        seconds = [trial["seconds"] for trial in found if trial["seconds"] is not None]
        lost = [trial["steps_lost"] for trial in found]
        told = f"{statistics.median(seconds):.1f}, {max(seconds):.1f}" if seconds else ""
        print(
            f"| {fault} | {len(found)} | {sum(trial['survived'] for trial in found)} | {told} "
            f"| {statistics.median(lost):.0f}, {max(lost)} |"
        )


if __name__ == "__main__":
    main(sys.argv[1])
