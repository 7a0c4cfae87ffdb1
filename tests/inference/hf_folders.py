"""Tiny model folders as `transformers` saves them, out of the golden files' configs."""

import importlib.util
import json
from pathlib import Path

from jaxscale.models import model_folder

MODELS = Path(__file__).parents[1] / "models"
NAMES = sorted(path.stem for path in (MODELS / "golden").glob("*.json"))

spec = importlib.util.spec_from_file_location("make_golden", MODELS / "make_golden.py")
assert spec and spec.loader
make_golden = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_golden)


def record_of(name):
    return json.loads((MODELS / "golden" / f"{name}.json").read_text())


def write_folder(folder, name, *, file_bytes=10_000, dtype="float32", **changes):
    """The folder, in several files; the weights are those of the golden logits."""
    record = record_of(name)
    shapes = {tensor: tuple(shape) for tensor, shape in record["shapes"].items()}
    weights = make_golden.draw(shapes, seed=record["seed"], norm=record["norm"])
    model_folder.write(
        folder,
        weights.items(),
        dtype=dtype,
        config_json=record["config"] | changes,
        file_bytes=file_bytes,
    )
    return folder
