"""Breaks one process of a run of several on this machine, again and again, and has it go on.

    python scripts/try_faults.py -n 2 --workdir=DIR -- --config=configs/tiny.py --config.steps=40 \
        --config.checkpoint.every=5

Prints how soon and in which words the other processes named the broken one, when all had left, what
the next start went on from, and how far its losses are from those of an undisturbed run; a table at
the end. kill: SIGKILL; stop: SIGSTOP; hang: a call of C that keeps Python's lock; memory: no room
on the devices of one process. With GPUs each process has its share of them; without, one device.
"""

import argparse
import sys
import time
from pathlib import Path

from jaxscale.command_line import EXIT_FAILED, EXIT_MISTAKE, tell
from jaxscale.perf import broken_runs
from jaxscale.perf.processes import FailedError
from jaxscale.perf.progress import show_progress


def main() -> int:
    show_progress()
    arguments = parse()
    options = broken_runs.Options(
        num=arguments.n,
        settings=tuple(arguments.settings),
        folder=Path(arguments.workdir).resolve(),
        step=arguments.step,
        timeout_seconds=arguments.timeout,
    )
    options.folder.mkdir(parents=True, exist_ok=True)
    began, trials = time.monotonic(), []
    try:
        wanted = broken_runs.undisturbed(options)
        if max(wanted) <= options.step + 1:
            raise ValueError(f"--step={options.step}: set it below {max(wanted) - 1}")
        for number in range(arguments.trials):
            for fault in arguments.faults.split(","):
                if time.monotonic() - began > arguments.seconds:
                    print(f"{fault}: no time was left", flush=True)
                    continue
                process = number % options.num
                trial = broken_runs.try_fault(fault, process, options=options, wanted=wanted)
                print(broken_runs.describe(trial), flush=True)
                trials.append(trial)
    except ValueError as error:
        return tell(error, EXIT_MISTAKE)
    except FailedError as error:
        return tell(error, EXIT_FAILED)
    print(broken_runs.table(trials))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=2, help="processes")
    parser.add_argument("--faults", default=",".join(broken_runs.FAULTS), help="of these")
    parser.add_argument("--trials", type=int, default=2, help="of each, another process each time")
    parser.add_argument("--step", type=int, default=12, help="done when one is broken")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of a run")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which none is begun")
    parser.add_argument("--workdir", required=True, help="where the runs and their output go")
    parser.add_argument("settings", nargs="+", help="after --: --config=FILE --config.x=y ...")
    arguments = parser.parse_args()
    if unknown := set(arguments.faults.split(",")) - set(broken_runs.FAULTS):
        parser.error(f"--faults={unknown.pop()}: one of {', '.join(broken_runs.FAULTS)}")
    if arguments.n < 2 or arguments.trials < 1:
        parser.error("-n is 2 or more, --trials 1 or more")
    if not arguments.settings[0].startswith("--config="):
        parser.error(f"{arguments.settings[0]}: write --config=FILE first")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
