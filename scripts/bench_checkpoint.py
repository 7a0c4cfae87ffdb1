"""Times checkpoints of a run of several processes on this machine, and moves it to other numbers.

    python scripts/bench_checkpoint.py -n 2,1,2 --workdir=DIR [--every=8] [--compare] -- \\
        --config=configs/llama3_8b.py [--config.x=y ...]

-n: processes of each start, with GPUs one for each. A start goes on from what the one before has
saved, saves once more after --every steps, and is killed when that is in place. Prints how long the
steps waited for the save, how fast they were beside it, and what was written and restored a second;
with --compare, how far the losses are from those of a run that stayed as it began.
"""

import argparse
import sys
from pathlib import Path

from jaxscale.command_line import EXIT_FAILED, EXIT_MISTAKE, tell
from jaxscale.perf import moved_runs
from jaxscale.perf.processes import FailedError


def main() -> int:
    arguments = parse()
    options = moved_runs.Options(
        nums=arguments.n,
        settings=tuple(arguments.settings),
        folder=Path(arguments.workdir).resolve(),
        every=arguments.every,
        timeout_seconds=arguments.timeout,
    )
    if (options.folder / "moved").exists():
        message = f"--workdir={arguments.workdir} holds a run already; name a new folder"
        return tell(ValueError(message), EXIT_MISTAKE)
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        for start in moved_runs.starts(options):
            print(moved_runs.describe(start), flush=True)
        if arguments.compare:
            wanted = moved_runs.undisturbed(options)
            off = moved_runs.largest_difference(options, wanted)
            print(f"losses are within {off:.1e} of those of a run that stayed as it began")
    except FailedError as error:
        return tell(error, EXIT_MISTAKE if error.code == EXIT_MISTAKE else EXIT_FAILED)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=numbers, required=True, help="processes of each start: 2,1,2")
    parser.add_argument("--every", type=int, default=8, help="steps from one save to the next")
    parser.add_argument("--compare", action="store_true", help="with a run that stays")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds of a start")
    parser.add_argument("--workdir", required=True, help="where the runs and their output go")
    parser.add_argument("settings", nargs="+", help="after --: --config=FILE --config.x=y ...")
    arguments = parser.parse_args()
    if arguments.every < 1:
        parser.error(f"--every={arguments.every}: 1 or more")
    if not arguments.settings[0].startswith("--config="):
        parser.error(f"{arguments.settings[0]}: write --config=FILE first")
    return arguments


def numbers(text: str) -> tuple[int, ...]:
    if not all(word.isdecimal() and int(word) for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text}: write numbers of processes, such as 2,1,2")
    return tuple(map(int, text.split(",")))


if __name__ == "__main__":
    sys.exit(main())
