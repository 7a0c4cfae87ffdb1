"""What a state consists of: its leaves by path (`params.layers.0.kernel`), and how two differ."""

import dataclasses
import json
import math
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """Shape and dtype of an array; dtype: numpy's name, which JSON can hold."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


Leaves = dict[str, Leaf]


def describe_saved(state: Any) -> Leaves:
    """The leaves of a pytree of jax.Array; ValueError for one that cannot be saved."""
    leaves = _leaves_by_path(state)
    for path, leaf in leaves.items():
        if reason := _why_not_saved(leaf):
            raise ValueError(f"{path} of the state {reason}")
    return {path: Leaf(tuple(leaf.shape), leaf.dtype.name) for path, leaf in leaves.items()}


def describe_wanted(abstract_state: Any) -> Leaves:
    """The leaves of a pytree of jax.ShapeDtypeStruct; ValueError for one without a sharding."""
    leaves = _leaves_by_path(abstract_state)
    for path, leaf in leaves.items():
        if not isinstance(leaf, jax.ShapeDtypeStruct) or leaf.sharding is None:
            raise ValueError(
                f"{path} of abstract_state is {leaf}; "
                "it must be a jax.ShapeDtypeStruct with a sharding"
            )
    return {
        path: Leaf(tuple(leaf.shape), np.dtype(leaf.dtype).name) for path, leaf in leaves.items()
    }


def to_json(leaves: Leaves) -> dict[str, tuple[tuple[int, ...], str]]:
    """As metadata.json holds them."""
    return {path: (leaf.shape, leaf.dtype) for path, leaf in leaves.items()}


def from_json(leaves: dict[str, Any]) -> Leaves:
    """What `to_json` gave, after a way through JSON."""
    return {path: Leaf(tuple(shape), dtype) for path, (shape, dtype) in leaves.items()}


def different_leaves(saved: Leaves, wanted: Leaves) -> list[str]:
    """A line for each leaf that only one of them has, or that cannot become the other."""
    lines = []
    for path in [*saved, *(path for path in wanted if path not in saved)]:
        old, new = saved.get(path), wanted.get(path)
        if old is None or new is None or not _is_convertible(old, new):
            lines.append(f"{path}: saved {old or 'absent'}, wanted {new or 'absent'}")
    return lines


def _is_convertible(saved: Leaf, wanted: Leaf) -> bool:
    """Floats become other floats; every other dtype has to be the same."""
    are_floats = all(
        jax.numpy.issubdtype(jax.numpy.dtype(leaf.dtype), jax.numpy.floating)
        for leaf in (saved, wanted)
    )
    return saved.shape == wanted.shape and (saved.dtype == wanted.dtype or are_floats)


def different_keys(saved: dict, wanted: dict, *, prefix: str = "") -> list[str]:
    """A line for each key in which two nested dicts differ: `model.num_layers: saved 4, now 6`.

    prefix: what stands before every key. Values are compared as JSON gives them back: (1, 2) equals
    [1, 2], and a StrEnum its string.
    """
    lines = []
    for key in [*saved, *(key for key in wanted if key not in saved)]:
        name = f"{prefix}.{key}" if prefix else str(key)
        old, new = saved.get(key, _ABSENT), wanted.get(key, _ABSENT)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += different_keys(old, new, prefix=name)
        elif _plain(old) != _plain(new):
            lines.append(f"{name}: saved {_shown(old)}, now {_shown(new)}")
    return lines


_ABSENT = object()


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else repr(_plain(value))


def _plain(value: Any) -> Any:
    return "absent" if value is _ABSENT else json.loads(json.dumps(value, default=str))


def _leaves_by_path(tree: Any) -> dict[str, Any]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    leaves = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}
    if len(leaves) != len(flat):
        raise ValueError(
            "two leaves of the state have the same path once its keys are joined by '.'; "
            "rename one of them"
        )
    return leaves


def _why_not_saved(leaf: Any) -> str | None:
    if not isinstance(leaf, jax.Array):
        return _only_arrays(type(leaf).__name__)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        return _only_arrays(str(leaf.dtype))
    if jax.process_count() > 1 and leaf.is_fully_addressable:
        return "exists on this process only; make it a global array before saving"
    if math.prod(leaf.shape) == 0:
        return f"has shape {leaf.shape}; an array without elements cannot be saved, leave it out"
    return None


def _only_arrays(kind: str) -> str:
    return f"is {kind}; only a plain jax.Array can be saved (for a key: jax.random.key_data)"
