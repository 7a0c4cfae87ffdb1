"""Prints a pipeline's timetable: what each stage does in each tick, the bubble, what is in flight.

    python scripts/explain_pipeline.py --schedule=interleaved --stages=4 --microbatches=8 --chunks=2

F forward, B input gradient, W weight gradient, X both gradients; --output=FILE.png draws it too.
"""

from absl import app, flags

from jaxscale.command_line import exit_code_of, file_of, parse_flags
from jaxscale.config import PipelineSchedule

CHOICES = [each.value for each in PipelineSchedule if each != PipelineSchedule.AUTO]

SCHEDULE = flags.DEFINE_enum("schedule", "one_f_one_b", CHOICES, "As config.pipeline.schedule.")
STAGES = flags.DEFINE_integer("stages", 4, "config.mesh.stage.", lower_bound=2)
MICROBATCHES = flags.DEFINE_integer("microbatches", 8, "config.grad_accumulation.", lower_bound=1)
CHUNKS = flags.DEFINE_integer("chunks", 2, "Of the interleaved schedule.", lower_bound=2)
LEAN = flags.DEFINE_bool("lean", False, "config.pipeline.lean.")
OUTPUT = flags.DEFINE_string("output", None, "A PNG to draw the timetable into.")


def main(argv: list[str]) -> int:
    del argv
    return exit_code_of(run)


def run() -> None:
    from jaxscale.parallel.schedules import Shape, explain, timetable
    from jaxscale.perf.timetable_plot import plot

    if MICROBATCHES.value < STAGES.value:
        raise ValueError(
            f"--microbatches={MICROBATCHES.value} are fewer than --stages={STAGES.value}; "
            "raise them"
        )
    schedule = PipelineSchedule(SCHEDULE.value)
    chunks = CHUNKS.value if schedule == PipelineSchedule.INTERLEAVED else 1
    shape = Shape(schedule, STAGES.value, MICROBATCHES.value, chunks, LEAN.value)
    output = file_of("output", OUTPUT.value)
    print(explain(shape))
    if OUTPUT.value:
        plot(timetable(shape), output)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
