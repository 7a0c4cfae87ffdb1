"""Divides a training step by what the GPU does: python scripts/anatomy.py TRACE [TRACE ...] [--png=FILE] [--json]

    python scripts/train.py --config configs/llama3_1b.py --workdir runs/x --config.profile.steps=4
    python scripts/anatomy.py runs/x/profile --png=step.png

TRACE: a folder that jax.profiler wrote to (the newest trace in it counts), or an .xplane.pb file. Two traces stand side
by side with their difference. Of several GPUs the text says how evenly they are loaded and what of the collectives is
waiting for others. jaxscale/anatomy.py says what counts in which row, jaxscale/hlo_names.py how CUDA graphs are named.
"""

import dataclasses
import json
import sys

from absl import app, flags

from jaxscale.perf import anatomy

DEVICE = flags.DEFINE_integer(
    "device", None, "The GPU to look at; unset, the one that computes longest.", lower_bound=0
)
TOP = flags.DEFINE_integer("top", 20, "Kernels to list.", lower_bound=0)
PNG = flags.DEFINE_string("png", None, "A file to draw the steps to, as stacked bars.")
JSON = flags.DEFINE_boolean("json", False, "One JSON record a trace in place of the text.")


def main(argv: list[str]) -> int | None:
    if len(argv) < 2:
        print("error: name at least one folder or .xplane.pb file of a trace", file=sys.stderr)
        return 2
    try:
        steps = [anatomy.anatomy(anatomy.read(path), DEVICE.value) for path in argv[1:]]
        print("\n".join(map(record, steps)) if JSON.value else anatomy.table(steps, top=TOP.value))
        if PNG.value:
            anatomy.plot(steps, PNG.value)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return None


def record(step: anatomy.Anatomy) -> str:
    """The step as JSON, in seconds and bytes, with its --top kernels."""
    share = {"exposed_communication_share": step.exposed_communication_share}
    shortened = dataclasses.replace(step, kernels=step.kernels[: TOP.value])
    return json.dumps(dataclasses.asdict(shortened) | share)


if __name__ == "__main__":
    app.run(main)
