"""Times variants of one training step against each other, in turns on one state.

    python scripts/bench_variants.py --config configs/llama3_8b.py [--config.x=y ...] \\
        --variant='base' --variant='no_triton: xla_gpu_enable_triton_gemm=false' \\
        --variant='kept: mesh.reshard_after_forward=False' --pairs

A variant is a name and settings between spaces: compiler options of XLA (their names begin with
xla_), optimization_level, and keys of the config. The first is what the others are compared with;
--pairs adds the others two at a time. Prints a table and, last, one JSON record. The same settings
under two names show what is noise (jaxscale/perf/contest.py says how they are timed).

Data and step are those of scripts/train.py, on one host. What cannot run (an option that this
jaxlib has not, a step that does not fit or raises) is left out with a line.
"""

import json

from absl import app, flags

from jaxscale.command_line import EXIT_FAILED, EXIT_MISTAKE, parse_own_flags, tell
from jaxscale.perf import contest, variants
from jaxscale.perf.contest_table import table
from jaxscale.perf.processes import FailedError
from jaxscale.perf.progress import show_progress
from jaxscale.xla.environment import set_environment

VARIANTS = flags.DEFINE_multi_string(
    "variant", [], "A name, a colon and settings between spaces; may be repeated."
)
PAIRS = flags.DEFINE_bool("pairs", False, "Add every pair of variants, but for the first.")
ROUNDS = flags.DEFINE_integer("rounds", 3, "How often every variant is timed.", lower_bound=1)
STEPS = flags.DEFINE_integer(
    "steps", 3, "Steps that count, in each round, after one that does not.", lower_bound=1
)
PROFILE = flags.DEFINE_list(
    "profile", [], "Variants to record 3 more steps of, in WORKDIR/NAME (scripts/anatomy.py)."
)
WORKDIR = flags.DEFINE_string("workdir", None, "Where the profiles go.")
COMMIT = flags.DEFINE_string(
    "commit", "", "The commit to put on record where this is no git checkout."
)


def main(argv: list[str]) -> int:
    show_progress()
    options = contest.Options(
        rounds=ROUNDS.value,
        num_steps=STEPS.value,
        profiled=PROFILE.value,
        workdir=WORKDIR.value,
        commit=COMMIT.value,
    )
    try:
        set_environment()
        entered = variants.read_variants(VARIANTS.value)
        if PAIRS.value:
            entered = variants.with_pairs(entered)
        record = contest.hold(entered, argv[1:], options=options)
    except ValueError as error:
        return tell(error, EXIT_MISTAKE)
    except FailedError as error:
        return tell(error, EXIT_FAILED)
    print(table(record))
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    app.run(main, flags_parser=parse_own_flags)
