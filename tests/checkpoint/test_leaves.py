"""The leaves of a state by path, and the keys in which two runs differ."""

import json

import jax.numpy as jnp
import pytest

from jaxscale.checkpoint import leaves
from jaxscale.checkpoint.leaves import Leaf, different_keys


def test_leaves_are_the_same_after_a_way_through_json():
    described = leaves.describe_saved(
        {"a": {"b": jnp.zeros((2, 3), jnp.bfloat16)}, "c": [jnp.int32(1)]}
    )
    assert described == {"a.b": Leaf((2, 3), "bfloat16"), "c.0": Leaf((), "int32")}
    assert leaves.from_json(json.loads(json.dumps(leaves.to_json(described)))) == described


def test_two_leaves_of_one_path_are_refused():
    with pytest.raises(ValueError, match="two leaves of the state have the same path"):
        leaves.describe_saved({"a": {"b": jnp.zeros(1)}, "a.b": jnp.zeros(1)})


def test_different_keys_are_listed_by_their_dotted_name():
    saved = {
        "seed": 1,
        "model": {"num_layers": 4, "shape": [1, 2], "old": None},
        "same": {"x": 1.0},
    }
    wanted = {"seed": 1, "model": {"num_layers": 6, "shape": (1, 2), "new": "a"}, "same": {"x": 1}}
    assert different_keys(saved, wanted) == [
        "model.num_layers: saved 4, now 6",
        "model.old: saved None, now absent",
        "model.new: saved absent, now 'a'",
    ]
    assert different_keys({"num_layers": 4}, {"num_layers": 6}, prefix="model") == [
        "model.num_layers: saved 4, now 6"
    ]
    assert different_keys(saved, saved) == []
