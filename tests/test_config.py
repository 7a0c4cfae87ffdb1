"""The configuration is typed: checked, kept as JSON, and overridden field by field."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_collections
import pytest

from jaxscale import config as run_config
from jaxscale.config import (
    AxisTypes,
    Config,
    Dtype,
    MeshConfig,
    Remat,
    check_key,
    from_config_dict,
    from_json,
    to_json,
)
from jaxscale.models import llama
from jaxscale.ops.rope import Scaling
from jaxscale.optim import adamw
from jaxscale.schedules import cosine, wsd

ROOT = Path(__file__).parents[1]


def small(**changes) -> Config:
    fields: dict[str, Any] = dict(
        model=llama.Config(
            vocab_size=257, model_dim=32, num_layers=2, num_heads=4, num_kv_heads=4, mlp_dim=64
        ),
        optim=adamw.Config(),
        schedule=cosine.Config(warmup_steps=2),
        steps=4,
        batch_size=8,
        seq_len=32,
    )
    return Config(**fields | changes)


def set_key(config, key, value):
    path, _, name = key.rpartition(".")
    setattr(run_config.get(config, path) if path else config, name, value)


def leaves(node, path=""):
    """Dotted name and value of every field that is no dataclass."""
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{path}{field.name}.")
        else:
            yield f"{path}{field.name}", value


def test_every_leaf_refuses_a_value_of_another_type():
    class Other:
        pass

    keys = [key for key, _ in leaves(small())]
    assert len(keys) > 50
    for key in keys:
        config = small()
        set_key(config, key, Other())
        with pytest.raises(
            ValueError,
            match=rf"config\.{re.escape(key)}=.*(set it to a value of type|is not one of)",
        ):
            run_config.validate(config)


OF_WRONG_TYPE = {
    "steps": (True, 4.0, "4", None),
    "z_loss": ("0.1", False),
    "data.shuffle": (1,),
    "data.path": (None,),
    "optim.no_decay": (["norm"], ("norm", 1), "norm"),
    "model.window": (2.5, "none"),
    "dtype": ("float64", None),
    "mesh": (None,),
    "mesh.axis_types": ("manual",),
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in OF_WRONG_TYPE.items() for value in values]
)
def test_a_value_of_the_wrong_type_is_refused_with_its_key(key, value):
    config = small()
    set_key(config, key, value)
    with pytest.raises(
        ValueError,
        match=rf"config\.{re.escape(key)}={re.escape(repr(value))} is (of type|not one of)",
    ):
        run_config.validate(config)


def test_what_stands_for_a_value_of_the_right_type_becomes_one():
    config = small(dtype="bfloat16", remat="full", z_loss=0)
    set_key(config, "mesh.axis_types", "auto")
    run_config.validate(config)
    assert (
        config.dtype is Dtype.BFLOAT16
        and config.remat is Remat.FULL
        and config.mesh.axis_types is AxisTypes.AUTO
    )
    assert type(config.z_loss) is float


@pytest.mark.parametrize("part", ["model", "optim", "schedule"])
def test_a_part_that_is_no_config_is_refused(part):
    for value in (None, {"peak": 1.0}, "llama"):
        with pytest.raises(
            ValueError,
            match=rf"config\.{part}={re.escape(repr(value))}: set it to the Config of a module",
        ):
            run_config.validate(small(**{part: value}))


def test_unknown_keys_are_named_with_the_nearest_known_one():
    data = to_json(small())
    data["mesh"]["tensr"] = 2
    with pytest.raises(
        ValueError,
        match=r"config\.mesh\.tensr is not a setting; did you mean config\.mesh\.tensor\?",
    ):
        from_json(data)
    with pytest.raises(
        ValueError, match=r"config\.modle is not a setting; did you mean config\.model\?"
    ):
        check_key(small(), "modle.num_layers")
    with pytest.raises(
        ValueError, match=r"config\.mesh\.qqq is not a setting; config\.mesh has stage, data, fsdp"
    ):
        check_key(small(), "mesh.qqq")
    for key, _ in leaves(small()):
        check_key(small(), key)
    check_key(small(), "model.rope_scaling.factor")  # None now, but `=build` may come with it


def test_json_gives_back_every_field_changed():
    config = small(
        model=llama.Config(
            vocab_size=300,
            model_dim=64,
            num_layers=3,
            num_heads=8,
            num_kv_heads=2,
            mlp_dim=96,
            head_size=16,
            window=7,
            rope_scaling=Scaling(factor=4.0),
            tie_embeddings=True,
            max_seq_len=64,
            qkv_bias=True,
        ),
        optim=adamw.Config(no_decay=("a", "b", "c")),
        schedule=wsd.Config(decay_steps=2),
        dtype=Dtype.FLOAT32,
        mesh=MeshConfig(tensor=2, axis_types=AxisTypes.AUTO),
    )
    data = to_json(config)
    assert data["schedule"]["type"] == "jaxscale.schedules.wsd:Config"
    back = from_json(json.loads(json.dumps(data)))
    assert back == config
    assert back.dtype is Dtype.FLOAT32 and back.optim.no_decay == ("a", "b", "c")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", {"vocab_size": 1}, "config.model has no type; add one"),
        (
            "model",
            {"type": "nowhere.at.all:Config"},
            "config.model.type='nowhere.at.all:Config' cannot be imported",
        ),
        (
            "model",
            {"type": "jaxscale.models.llama:Other"},
            "config.model.type='jaxscale.models.llama:Other' cannot be",
        ),
        (
            "model",
            {"type": "jaxscale.models.llama:Model"},
            "config.model.type='jaxscale.models.llama:Model' is not a dataclass",
        ),
        (
            "model",
            {"type": "jaxscale.models.llama:Config"},
            "config.model: .*missing .*'vocab_size'",
        ),
        ("steps", "many", "config.steps='many' is of type str; set it to a value of type int"),
        ("steps", {"one": 1}, "config.steps has no type"),
    ],
)
def test_json_that_is_no_config_is_refused_with_the_key(key, value, message):
    with pytest.raises(ValueError, match=message):
        from_json(to_json(small()) | {key: value})


def test_a_config_dict_is_taken_and_checked_like_a_config():
    data = to_json(small())
    assert from_config_dict(ml_collections.ConfigDict(data)) == small()
    loose = ml_collections.ConfigDict(data)
    loose.optim.no_decay = ("norm",)
    loose.mesh.tensor = 2
    taken = from_config_dict(loose)
    assert (
        taken.optim.no_decay == ("norm",)
        and taken.mesh.tensor == 2
        and taken.dtype is Dtype.BFLOAT16
    )
    wrong = ml_collections.ConfigDict(data)
    with wrong.unlocked():
        wrong.mesh.tensr = 2
    with pytest.raises(ValueError, match="did you mean config.mesh.tensor"):
        from_config_dict(wrong)


def test_the_mesh_takes_what_the_axis_of_minus_one_leaves():
    assert MeshConfig(tensor=2).sizes(8) == dict(
        stage=1, data=1, fsdp=4, expert=1, context=1, tensor=2
    )
    assert MeshConfig(data=2, fsdp=4).sizes(8)["fsdp"] == 4
    for mesh in (MeshConfig(tensor=3), MeshConfig(fsdp=4), MeshConfig(fsdp=16)):
        with pytest.raises(ValueError, match="devices and 8 are here"):
            mesh.sizes(8)


# What stands on the command line, and what the run's config.json then holds.
OVERRIDES = {
    "--config.steps=1": ("steps", 1),
    "--config.batch_size 16": ("batch_size", 16),
    "--config.schedule.warmup_steps=0": ("schedule.warmup_steps", 0),
    "--config.z_loss=1e-4": ("z_loss", 1e-4),
    "--config.schedule.peak=1": ("schedule.peak", 1.0),
    "--config.model.tie_embeddings": ("model.tie_embeddings", True),
    "--noconfig.data.shuffle": ("data.shuffle", False),
    "--config.mesh.sequence_parallel=false": ("mesh.sequence_parallel", False),
    "--config.sample.prompt=a=b": ("sample.prompt", "a=b"),
    "--config.data.text_field=": ("data.text_field", ""),
    "--config.dtype=float32": ("dtype", "float32"),
    "--config.remat=ATTENTION_MLP": ("remat", "attention_mlp"),
    "--config.mesh.axis_types=auto": ("mesh.axis_types", "auto"),
    "--config.optim.no_decay=('norm',)": ("optim.no_decay", ["norm"]),
    "--config.model.window=9": ("model.window", 9),
    "--config.model.max_seq_len=none": ("model.max_seq_len", None),
    "--config.xla_options=xla_backend_optimization_level=0 --config.xla_options='xla_bogus=a,b'": (
        "xla_options",
        ["xla_backend_optimization_level=0", "xla_bogus=a,b"],
    ),
    "--config.model.rope_scaling=build": None,
    "--config.model.rope_scaling.factor=4": ("model.rope_scaling.factor", 4.0),
}


def test_every_type_of_field_is_overridden_on_the_command_line_of_a_config_dict_file(tmp_path):
    """A file that returns an ml_collections ConfigDict goes the way of one with a Config."""
    data = json.loads(json.dumps(to_json(small()))) | {
        "checkpoint": {"enabled": False},
        "log": {"tensorboard": False},
    }
    data["data"] = {
        "path": str(tmp_path / "*.txt"),
        "cache_dir": str(tmp_path),
        "eval_fraction": 0.3,
    }
    data["model"]["max_seq_len"], data["evaluation"], data["sample"]["tokens"] = (
        64,
        {"batches": 1},
        0,
    )
    (tmp_path / "config.py").write_text(
        "from ml_collections import ConfigDict\n\n\ndef get_config(arg=''):\n    return ConfigDict("
        + repr(data)
        + ")\n"
    )
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text("Some words to learn from. " * 20)
    arguments = [word for override in OVERRIDES for word in override.split()]
    script = ROOT / "scripts/train.py"
    subprocess.run(
        [sys.executable, script, "--config", "config.py", "--workdir", "run", *arguments],
        cwd=tmp_path,
        check=True,
        env=os.environ,
        timeout=600,
    )
    saved = from_json(json.loads((tmp_path / "run" / "config.json").read_text()))
    wanted = from_json(data)
    wanted.model.rope_scaling = Scaling()
    for override in OVERRIDES.values():
        if override:
            key, value = override
            set_key(wanted, key, tuple(value) if isinstance(value, list) else value)
    run_config.validate(wanted)
    assert saved == wanted
