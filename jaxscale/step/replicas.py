"""What several devices hold alike must be alike, bit for bit; what is not, and on which device."""

import collections
import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxscale.step.device_sums import jitted_sums, num_bytes_read, of_every_device
from jaxscale.step.plan import Plan
from jaxscale.step.state import TrainState, to_flat

# Places in `mesh.devices.flat` that hold the same part of a leaf.
Group = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Odd:
    """A part of a leaf whose copies differ.

    places: of the devices that are wrong, in `mesh.devices.flat`; or, where no majority says which
    (is_certain=False), of all that hold it. num_copies: of the part.
    """

    leaf: str
    places: Group
    num_copies: int
    is_certain: bool


@dataclasses.dataclass(frozen=True)
class Replicas:
    """Compares the copies in a plan's state. leaves: those that have any, by name.

    num_bytes: what a comparison reads on each device. sums: the jitted program, of the leaves.
    """

    plan: Plan
    leaves: tuple[str, ...]
    groups: tuple[tuple[Group, ...], ...]
    num_bytes: int
    sums: jax.stages.Wrapped

    def odd(self, state: TrainState) -> list[Odd]:
        """What differs; the same on every process, and every process calls it."""
        if not self.leaves:
            return []
        flat = to_flat(state)
        sums = self.sums([flat[name] for name in self.leaves])
        return compare(
            of_every_device(sums, self.plan.mesh), dict(zip(self.leaves, self.groups, strict=True))
        )


def replicas_of(plan: Plan) -> Replicas:
    """Of a plan's state: what has no copy is never read."""
    groups = {name: _groups(leaf, plan) for name, leaf in to_flat(plan.state).items()}
    groups = {name: found for name, found in groups.items() if found}
    leaves = [to_flat(plan.state)[name] for name in groups]
    return Replicas(
        plan,
        tuple(groups),
        tuple(groups.values()),
        num_bytes_read(leaves),
        jitted_sums(leaves, mesh=plan.mesh),
    )


def _groups(leaf: jax.ShapeDtypeStruct, plan: Plan) -> tuple[Group, ...]:
    """The devices that hold the same part of a leaf, where they are several."""
    place = {device: number for number, device in enumerate(plan.mesh.devices.flat)}
    holders: dict[tuple, list[int]] = collections.defaultdict(list)
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        part = tuple(map(slice.indices, index, leaf.shape))
        holders[part].append(place[device])
    return tuple(tuple(sorted(group)) for group in holders.values() if len(group) > 1)


def compare(sums: np.ndarray, groups: dict[str, Sequence[Group]]) -> list[Odd]:
    """sums: uint32 [devices, leaves, words], the leaves in the order of `groups`."""
    found = []
    for number, (leaf, parts) in enumerate(groups.items()):
        for group in parts:
            said = {place: sums[place, number].tobytes() for place in group}
            if len(set(said.values())) == 1:
                continue
            ((usual, count),) = collections.Counter(said.values()).most_common(1)
            is_certain = 2 * count > len(group)
            odd = [place for place in group if not is_certain or said[place] != usual]
            found.append(Odd(leaf, tuple(odd), len(group), is_certain))
    return found
