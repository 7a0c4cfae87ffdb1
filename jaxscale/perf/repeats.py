"""One program of an update run again and again from one start: whether the same bits come out.

What `config.deterministic` promises, looked at leaf by leaf and device by device.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence

import jax
import numpy as np

from jaxscale import sharding as shd
from jaxscale.compile.fit import CompiledUpdate, compile_to_fit
from jaxscale.config import Config
from jaxscale.data.batch import Batch
from jaxscale.step.device_sums import jitted_sums, of_every_device
from jaxscale.step.feed import device_batches
from jaxscale.step.plan import corpus_of_run, plan_of_run
from jaxscale.step.state import init_state, to_flat
from jaxscale.step.update import update
from jaxscale.xla.cache import enable_compilation_cache

NUM_NAMED = 6  # of leaves that differ
# Of an update: its result as text, and checksums of the state, uint32 [devices, leaves, words].
Came = tuple[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Compared:
    """An update, the same one each time.

    number: from 1. results: the losses and gradient norms that came out, each pair once, to the
    last digit. different: of the state's leaves those that differ from the first time's, by name,
    with the devices on which they do (places in `mesh.devices.flat`).
    """

    number: int
    results: tuple[str, ...]
    different: dict[str, tuple[int, ...]]

    @property
    def is_same(self) -> bool:
        return len(self.results) == 1 and not self.different

    def __str__(self) -> str:
        results = "; ".join(self.results)
        if not self.different:
            return f"update {self.number}: {results}; the state is the same"
        places = sorted(set(itertools.chain.from_iterable(self.different.values())))
        names = [*self.different]
        if more := names[NUM_NAMED:]:
            names = [*names[:NUM_NAMED], f"{len(more)} more"]
        return (
            f"update {self.number}: {results}; of the state differ, on devices "
            f"{', '.join(map(str, places))}: {', '.join(names)}"
        )


def repeat(
    config: Config,
    *,
    times: int,
    num_updates: int,
    devices: Sequence[jax.Device] | None = None,
) -> list[Compared]:
    """The config's first updates, compiled once and run so many times; up to one that differs.

    Each starts from the state that the seed makes, on the same batches. devices: all there are
    unless given. Raises ValueError for a user's mistake before anything is compiled, and for an
    update that does not fit.
    """
    corpus = corpus_of_run(config)
    enable_compilation_cache()
    plan = plan_of_run(config, corpus=corpus, devices=devices or jax.devices())
    compiled = compile_to_fit(update, plan)
    plan = compiled.plan
    with contextlib.closing(device_batches(plan, corpus.train, start=0)) as loader:
        batches = [next(loader) for _ in range(num_updates)]
    flat = to_flat(plan.state)
    sums = jitted_sums(list(flat.values()), mesh=plan.mesh)
    runs = [_run(compiled, batches, sums=sums) for _ in range(times)]
    found = []
    for number, same_update in enumerate(zip(*runs, strict=True), 1):
        found.append(compare(number, same_update, names=list(flat)))
        if not found[-1].is_same:
            break
    return found


def _run(compiled: CompiledUpdate, batches: Sequence[Batch], *, sums) -> list[Came]:
    """What came out of each update, from the first state on."""
    plan, came = compiled.plan, []
    state = init_state(plan)
    for batch in batches:
        with shd.use(plan.mesh, plan.rules):
            state, metrics = compiled(state, batch)
        loss, norm = (float(metrics[key]) for key in ("loss", "grad_norm"))
        checksums = of_every_device(sums(list(to_flat(state).values())), plan.mesh)
        came.append((f"loss {loss!r}, norm {norm!r}", checksums))
    return came


def compare(number: int, runs: Sequence[Came], *, names: Sequence[str]) -> Compared:
    """runs: what came out each time. names: of the leaves."""
    results = tuple(dict.fromkeys(result for result, _ in runs))
    first, *others = (sums for _, sums in runs)
    differs = np.any([(other != first).any(axis=2) for other in others], axis=0)
    different = {
        name: tuple(np.flatnonzero(differs[:, leaf]).tolist())
        for leaf, name in enumerate(names)
        if differs[:, leaf].any()
    }
    return Compared(number, results, different)
