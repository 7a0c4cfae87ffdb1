"""Whatever is typed as a setting is taken, or refused with its key: never another exception.

Settings go through the reader that command lines use, and through config.json's, up to the layout
on eight devices. The tries are drawn from a fixed seed.
"""

import copy
import dataclasses
import importlib
import json
import pkgutil
import random
import types
import typing
from typing import Any

import pytest

import jaxscale.models
import jaxscale.optim
import jaxscale.schedules
from jaxscale import command_line
from jaxscale import config as run_config
from jaxscale.config import Config, from_json, to_json
from jaxscale.models import gemma, llama
from jaxscale.ops import rope
from jaxscale.optim import adafactor, adamw
from jaxscale.schedules import cosine, wsd

TRIES = 2000

SIZES: dict[str, Any] = dict(
    vocab_size=257, model_dim=64, num_layers=2, num_heads=8, num_kv_heads=8, mlp_dim=64
)
RUN: dict[str, Any] = dict(steps=2000, batch_size=8, seq_len=32)
BASES = (
    Config(
        model=llama.Config(**SIZES, rope_scaling=rope.Scaling()),
        optim=adamw.Config(),
        schedule=cosine.Config(),
        **RUN,
    ),
    Config(model=gemma.Config(**SIZES), optim=adafactor.Config(), schedule=wsd.Config(), **RUN),
)

# As somebody may type them, by kind.
TYPED = {
    "whole": ["0", "1", "-1", "2", "3", "7", "8", "64", "257", "0x10", "0b1", "1_000", "1__0"],
    "huge": [str(2**31 - 1), str(2**31), str(2**32), str(2**63), "9" * 23, "9" * 5000],
    "huge in hex": ["0x" + "f" * 20, "0x" + "f" * 6000],
    "negative": ["-0", "-2", "-0.5", "-1e-300", "-" + "9" * 30, "-1e400"],
    "fractions": ["0.5", "1.5", "1.0", "1e5", "0.99999999999", "1e-8"],
    "beyond float32": ["1e-300", "1e-40", "1e39", "3.5e38", "1e400"],
    "not finite": ["nan", "NaN", "inf", "-inf", "Infinity"],
    "empty": ["", " ", "''", '""', "()", "[]", "{}", "None", "none", "null"],
    "of another type": [
        "true",
        "False",
        "['a']",
        "('a', 1)",
        "('a',)",
        "{'a': 1}",
        "build",
        "text",
    ],
    "broken": [
        "(1,",
        "'",
        '"',
        "\\",
        "%s",
        "{0}",
        "=",
        "==",
        "--config",
        "\n",
        "(" * 300,
        "." * 300,
    ],
    "unicode": ["ünïcödé", "日本語", "٣", "½", "\u202e", "\udcff", "\U0001f4a5"],
}
# As a config.json may hold them.
HELD: list[Any] = [
    None,
    True,
    -1,
    0,
    3,
    2**40,
    10**400,
    0.5,
    -0.0,
    1e-300,
    1e39,
    float("nan"),
    float("inf"),
]
HELD += ["", "text", "a\0b", "\ud800", [], [1], ["a", 1], [[]], {}, {"a": 1}, {"type": 1}]
HELD += [{"type": name} for name in ("", ":", "..a:b", "os:path", "jaxscale.config:Config")]
HELD += [{"type": "jaxscale.optim.adamw:Config"}, {"type": "jaxscale.schedules.wsd:Config"}]


def keys(node, prefix=""):
    """The dotted name of every field, also of those that hold fields."""
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        yield f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from keys(value, f"{prefix}{field.name}.")


def misspelt(key, draw):
    place = draw.randrange(len(key))
    letter = draw.choice(["", "x", key[place] * 2, "[0]", " ", "é"])
    return key[:place] + letter + key[place + 1 :]


def words_for(key, value, *, draw):
    """The setting in one of the ways of typing it."""
    whole = f"--config.{key}={value}"
    ways = [[whole], [whole[1:]], [whole, whole], [f"--noconfig.{key}"]]
    if not value.startswith("-"):  # behind a bool it is a flag of its own
        ways.append([f"--config.{key}", value])
    return draw.choice(ways)


def outcome(read):
    """None for what is taken, or the message of what is refused."""
    try:
        config = read()
        run_config.validate(config)
        run_config.validate_on(config, 8)
    except ValueError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    paths = [folder / f"{number}.json" for number in range(len(BASES))]
    for path, config in zip(paths, BASES, strict=True):
        path.write_text(json.dumps(to_json(config)))
        command_line.read_config([f"--config={path}"])
    return paths


def assert_names(key, message, *, case):
    """Or the mesh's axes, whose product is wrong."""
    is_of_mesh = f"{key.rpartition('.')[2]}=" in message and "config.mesh (" in message
    assert f"config.{key}" in message or is_of_mesh, (case, message)


def test_whatever_is_typed_for_a_key_is_taken_or_refused_with_the_key(files):
    draw, counts = random.Random(0), {True: 0, False: 0}
    for _ in range(TRIES):
        number = draw.randrange(len(BASES))
        key = draw.choice([*keys(BASES[number])])
        words = words_for(key, draw.choice(TYPED[draw.choice([*TYPED])]), draw=draw)
        case = [f"--config={files[number]}", *words]
        message = outcome(lambda case=case: command_line.read_config(case))
        counts[message is None] += 1
        if message is not None:
            assert_names(key, message, case=case)
            assert len(message) < 1000, message
    assert min(counts.values()) > TRIES / 20, counts


def test_a_key_that_is_not_there_is_refused_with_its_name(files):
    draw = random.Random(1)
    for _ in range(TRIES // 10):
        number = draw.randrange(len(BASES))
        known = [*keys(BASES[number])]
        key = misspelt(draw.choice(known), draw)
        if key in known:
            continue
        case = [f"--config={files[number]}", f"--config.{key}=1"]
        message = outcome(lambda case=case: command_line.read_config(case))
        assert message is not None, case
        assert "config." in message and "is not a setting" in message, (case, message)


def test_whatever_a_config_json_holds_is_taken_or_refused_with_the_key():
    draw = random.Random(2)
    for _ in range(TRIES // 2):
        base = draw.choice(BASES)
        data, key = copy.deepcopy(to_json(base)), draw.choice([*keys(base)])
        *path, name = key.split(".")
        node = data
        for part in path:
            node = node[part]
        value = node[name] = draw.choice(HELD)
        message = outcome(lambda data=data: from_json(data))
        if message is not None:
            assert_names(key, message, case=value)


def test_no_number_is_without_a_range():
    """By every Config there is: a new field, or a new file, cannot be forgotten."""
    classes: set[Any] = {rope.Scaling, Config}
    for package in (jaxscale.models, jaxscale.optim, jaxscale.schedules):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            found = getattr(importlib.import_module(module.name), "Config", None)
            classes |= {found} if found else set()
    for hint in typing.get_type_hints(Config).values():
        classes |= {hint} if dataclasses.is_dataclass(hint) else set()
    assert len(classes) > 12
    assert [name for cls in classes for name in without_range(cls)] == []


def without_range(cls):
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        if {int, float} & set(options) and "range" not in field.metadata:
            yield f"{cls.__module__}.{cls.__qualname__}.{field.name}"


def test_a_number_without_a_range_would_be_found():
    @dataclasses.dataclass
    class Careless:
        size: int
        scale: float | None = None
        name: str = ""
        flag: bool = False

    assert [name.rpartition(".")[2] for name in without_range(Careless)] == ["size", "scale"]
