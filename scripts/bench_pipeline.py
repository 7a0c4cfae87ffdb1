"""Times a pipeline's schedules beside FSDP, and their bubbles, with one GPU a stage.

    python scripts/bench_pipeline.py --config configs/llama3_8b.py [--config.x=y ...]
        [--schedules=fsdp,interleaved_4,...] [--microbatches=8,32] [--profile=one_f_one_b]

Rows go through one at a time; FSDP takes two a GPU. Prints a table and, last, one JSON record:
seconds and tokens/s a device of each schedule and number of microbatches, the bubble measured and
that of the timetable, memory predicted (jaxscale/perf/pipeline_speed.py says how).
Without --profile, of at least one schedule, the optimiser's time counts as a bubble.
"""

import json
import math
import time

from absl import app, flags

from jaxscale.command_line import EXIT_FAILED, EXIT_MISTAKE, parse_own_flags, tell
from jaxscale.perf import pipeline_speed
from jaxscale.perf.processes import FailedError
from jaxscale.perf.progress import show_progress
from jaxscale.xla.environment import set_environment

SCHEDULES = flags.DEFINE_list(
    "schedules", list(pipeline_speed.SCHEDULES), "Which to time, in this order."
)
MICROBATCHES = flags.DEFINE_list("microbatches", ["8", "32"], "Rows of an update: two numbers.")
STEPS = flags.DEFINE_integer("steps", 2, "Steps that count, after one that does not.", 1)
PROFILE = flags.DEFINE_list(
    "profile", [], "Schedules of which a step is recorded, in WORKDIR/NAME (scripts/anatomy.py)."
)
WORKDIR = flags.DEFINE_string("workdir", None, "Where the profiles go.")
SECONDS = flags.DEFINE_float("seconds", math.inf, "After which nothing more begins.")
COMMIT = flags.DEFINE_string(
    "commit", "", "The commit to put on record where this is no git checkout."
)


def main(argv: list[str]) -> int:
    show_progress()
    began = time.monotonic()
    try:
        options = pipeline_speed.Options(
            schedules=SCHEDULES.value,
            microbatches=[_number(text) for text in MICROBATCHES.value],
            num_steps=STEPS.value,
            profiled=PROFILE.value,
            workdir=WORKDIR.value,
            ends=began + SECONDS.value,
            commit=COMMIT.value,
        )
        set_environment()
        record = pipeline_speed.measure(argv[1:], options)
    except ValueError as error:
        return tell(error, EXIT_MISTAKE)
    except FailedError as error:
        return tell(error, EXIT_FAILED)
    print(pipeline_speed.table(record))
    print(json.dumps(record))
    return 0


def _number(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ValueError(f"--microbatches={text!r}: write numbers of 1 and more, such as 8,32")
    return int(text)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_own_flags)
