"""Divides a training step by what the GPU does.

    python scripts/train.py --config configs/llama3_1b.py --workdir runs/x --config.profile.steps=4
    python scripts/anatomy.py runs/x/profile [TRACE ...] [--png=step.png] [--json]

TRACE: a folder that jax.profiler wrote to (the newest trace in it counts), or an .xplane.pb file.
Two traces are set side by side with their difference. Of several GPUs the text says how evenly they
are loaded and what of the collectives is waiting for others. jaxscale/perf/anatomy.py says what
counts in which row, jaxscale/perf/graph_names.py how CUDA graphs are named.
"""

from absl import app, flags

from jaxscale.command_line import EXIT_MISTAKE, file_of, parse_flags_and_words, tell
from jaxscale.perf.anatomy import anatomy, to_json
from jaxscale.perf.anatomy_plot import plot
from jaxscale.perf.anatomy_table import table
from jaxscale.perf.trace import read

DEVICE = flags.DEFINE_integer(
    "device", None, "The GPU to look at; unset, the one that computes longest.", lower_bound=0
)
TOP = flags.DEFINE_integer("top", 20, "Kernels to list.", lower_bound=0)
PNG = flags.DEFINE_string("png", None, "A file to draw the steps to, as stacked bars.")
JSON = flags.DEFINE_boolean("json", False, "One JSON record a trace in place of the text.")


def main(argv: list[str]) -> int | None:
    if len(argv) < 2:
        message = "name at least one folder or .xplane.pb file of a trace"
        return tell(ValueError(message), EXIT_MISTAKE)
    try:
        png = file_of("png", PNG.value)
        steps = [anatomy(read(path), DEVICE.value) for path in argv[1:]]
        if JSON.value:
            print("\n".join(to_json(step, top=TOP.value) for step in steps))
        else:
            print(table(steps, top=TOP.value))
        if PNG.value:
            plot(steps, png)
    except (OSError, ValueError) as error:
        return tell(error, EXIT_MISTAKE)
    return None


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags_and_words)
