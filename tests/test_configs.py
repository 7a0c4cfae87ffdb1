"""The config files that come with jaxscale: each is sound and says how it is run, and on what."""

import ast
import copy
import importlib.util
import json
import math
import re
from pathlib import Path

import pytest

from jaxscale import config as run_config
from jaxscale.config import Config, from_json, to_json

FILES = sorted((Path(__file__).parents[1] / "configs").glob("*.py"))
# One with each argument that a file's header names.
VARIANTS = {"llama3_1b.py": ["tied"]}


def load(file: Path, *arguments: str) -> Config:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(*arguments)


CONFIGS = {
    (file, *rest): load(file, *rest)
    for file in FILES
    for rest in [(), *((v,) for v in VARIANTS.get(file.name, []))]
}


def header_of(file: Path) -> str:
    return ast.get_docstring(ast.parse(file.read_text())) or ""


def ids(case):
    return ":".join([case[0].stem, *case[1:]])


def test_there_are_configs_and_their_variants_are_known():
    assert {"tiny.py", "llama3_8b.py"} <= {file.name for file in FILES}
    for file in FILES:
        named = re.findall(rf"configs/{file.name}:(\w+)`", header_of(file))
        assert named == VARIANTS.get(file.name, [])


@pytest.mark.parametrize("case", CONFIGS, ids=ids)
def test_a_config_is_valid_and_the_same_after_json(case):
    config = copy.deepcopy(CONFIGS[case])
    run_config.validate(config)
    assert config == CONFIGS[case]  # nothing had to be converted
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


@pytest.mark.parametrize("case", CONFIGS, ids=ids)
def test_a_config_fits_the_hardware_that_its_header_names(case):
    config, (hardware,) = CONFIGS[case], re.findall(r"Hardware: (.*)", header_of(case[0]))
    cards = r"(\d+)(?: or more)? (?:H[12]00|virtual)"
    counts = [int(number) for number in re.findall(cards, hardware)] or [1]
    for num_devices in counts:
        sizes = run_config.validate_on(config, num_devices)
        assert math.prod(sizes.values()) == num_devices


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_header_has_the_command_the_hardware_and_where_the_figures_are(file):
    header = header_of(file)
    assert (
        f"python scripts/train.py --config configs/{file.name} --workdir runs/{file.stem}" in header
    )
    assert re.search(r"Hardware: \w", header)
    assert re.search(r"Expect [\s\S]*docs/benchmarks\.md|Not run at this size", header)


def test_an_unknown_variant_is_refused_with_the_known_one():
    file = next(file for file in FILES if file.name == "llama3_1b.py")
    with pytest.raises(
        ValueError, match="llama3_1b.py:big is not a variant; leave it out or write 'tied'"
    ):
        load(file, "big")
