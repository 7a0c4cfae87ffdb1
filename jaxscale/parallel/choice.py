"""How a run's stages work: the schedule that the config names, or the one that takes least time."""

import dataclasses
from collections.abc import Mapping

from jaxscale.config import Config, PipelineSchedule, num_row_shards
from jaxscale.parallel.placement import Placement, placement_of
from jaxscale.parallel.schedules import Shape, Table, timetable

# Chunks that `auto` weighs. More would halve messages' time to hide in, and the bubble once more.
CHUNKS = (2, 4)
# How much longer several chunks take with a microbatch of so many tokens on a device, where layers
# are unrolled: a chunk's weights are copied before products read them, and its gradients are added
# after theirs. 207.4 ms instead of 202.6 (Llama 3 8B, 4 x H200, docs/benchmarks.md); a loop over
# layers copies anyway.
CHUNKS_COST, CHUNKS_TOKENS = 0.024, 8192
# And gradients apart: what crosses over, 700 MB a layer and row of 8192, is written and read. 232.8
# ms instead of the 229.8 of two chunks, which count as above (the same, with remat=attention).
SPLIT_COST = 0.037


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A schedule, and where it has the layers. reason: why this one, in a line."""

    schedule: PipelineSchedule
    placement: Placement
    is_lean: bool
    reason: str

    def table(self, num_microbatches: int, *, is_training: bool = True) -> Table:
        return timetable(
            Shape(
                self.schedule,
                num_stages=self.placement.num_stages,
                num_microbatches=num_microbatches,
                num_chunks=self.placement.num_chunks,
                is_lean=self.is_lean,
                is_training=is_training,
            )
        )


def choose(config: Config, *, sizes: Mapping[str, int], turn: int) -> Pipeline:
    """sizes: of the mesh's axes. turn: the kinds of layers that take turns, whole in each chunk.

    Raises ValueError for more stages, or chunks of them, than there are turns of layers.
    """
    layers, wanted, num_stages = config.model.num_layers, config.pipeline, sizes["stage"]
    if layers < num_stages * turn:
        raise ValueError(
            f"config.mesh.stage={num_stages} is more than the {layers} layers of config.model have "
            f"turns of {turn}; set it to {max(1, layers // turn)} or less"
        )
    if wanted.schedule != PipelineSchedule.AUTO:
        chunks = wanted.chunks if wanted.schedule == PipelineSchedule.INTERLEAVED else 1
        if layers < num_stages * chunks * turn:
            raise ValueError(
                f"config.pipeline.chunks={chunks} of {num_stages} stages are more than the "
                f"{layers} layers of config.model have turns of {turn}; set it to "
                f"{layers // (num_stages * turn)} or less, or "
                "config.pipeline.schedule='one_f_one_b'"
            )
        chosen = _pipeline(
            config, wanted.schedule, num_chunks=chunks, num_stages=num_stages, turn=turn
        )
        return dataclasses.replace(chosen, reason=_described(chosen, config))
    kinds = [(PipelineSchedule.ONE_F_ONE_B, 1), (PipelineSchedule.ZB_H1, 1)]
    kinds += [
        (PipelineSchedule.INTERLEAVED, chunks)
        for chunks in CHUNKS
        if layers >= num_stages * chunks * turn
    ]
    candidates = [
        _pipeline(config, schedule, num_chunks=chunks, num_stages=num_stages, turn=turn)
        for schedule, chunks in (kinds[:1] if wanted.lean else kinds)
    ]
    cost = _chunks_cost(config, sizes)
    best, *others = sorted(candidates, key=lambda each: _time(each, config, chunks_cost=cost))
    shown = "; ".join(_described(each, config) for each in others)
    reason = _described(best, config) + (f" (instead of {shown})" if shown else "")
    if shown and cost:
        reason += f"; several chunks count as {cost:.1%} slower"
    return dataclasses.replace(best, reason=reason)


def _pipeline(config: Config, schedule, *, num_chunks, num_stages, turn) -> Pipeline:
    placement = placement_of(
        config.model.num_layers, num_stages=num_stages, num_chunks=num_chunks, turn=turn
    )
    return Pipeline(schedule, placement, config.pipeline.lean, reason="")


def bubble(pipeline: Pipeline, config: Config) -> float:
    """The table's, and the places without a layer."""
    placement = pipeline.placement
    filled = placement.num_layers / placement.num_places
    return 1 - (1 - pipeline.table(config.grad_accumulation).bubble()) * filled


def _chunks_cost(config: Config, sizes: Mapping[str, int]) -> float:
    if config.scan_unroll < config.model.num_layers:
        return 0.0
    rows = config.batch_size // config.grad_accumulation
    split = num_row_shards(sizes) * sizes["context"]
    return CHUNKS_COST * CHUNKS_TOKENS * split / (rows * config.seq_len)


def _time(pipeline: Pipeline, config: Config, *, chunks_cost: float) -> float:
    """Of an update, relative to stages that are always busy with one chunk."""
    is_split = pipeline.schedule == PipelineSchedule.ZB_H1
    slower = chunks_cost * (pipeline.placement.num_chunks > 1) + SPLIT_COST * is_split
    return (1 + slower) / (1 - bubble(pipeline, config))


def _described(pipeline: Pipeline, config: Config) -> str:
    table = pipeline.table(config.grad_accumulation)
    in_flight = table.most_in_flight() / table.shape.num_chunks
    share = bubble(pipeline, config)
    return f"{table.shape.name}: bubble {share:.1%}, {in_flight:g} microbatches in flight"
