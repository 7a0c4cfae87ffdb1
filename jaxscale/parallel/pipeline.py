"""Runs any table of `schedules.py` as one program, on each stage's own part of the arrays.

Call it inside a `jax.shard_map` that is manual over `stage` alone: the model's own code runs inside
on the other axes. Aligned tables become straight blocks of a forward op and the gradients' ops
(`blocks.py`), without control flow, so that XLA runs messages and collectives beside the products.
A stage that has nothing to do in a tick computes on stale numbers, and what comes of it is dropped.
Lean tables are one loop over ticks, in which each stage enters its own op.

Embeddings and the loss are made by all stages together, a share of the vocabulary each: none holds
or computes all of it. M microbatches, V chunks, L layers of a chunk.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.parallel import blocks, layer_store
from jaxscale.parallel.layer_gradients import LayerGradients
from jaxscale.parallel.layer_store import STAGE, LayerStore, Place, at, put, zeros
from jaxscale.parallel.placement import Placement
from jaxscale.parallel.schedules import Kind, Table, buffers

# In which gradients are summed over microbatches.
SUM = jnp.float32


class Parts(NamedTuple):
    """What a pipeline asks of a model.

    outer: a list of the arrays that belong to no layer; microbatch: a `Batch` of [rows, seq].
    embed: (outer, microbatch) -> x. share: microbatch -> what all layers read. layers: (weights of
    one layer, x, shared) -> x, which take turns. head: (outer, x, microbatch) -> its part of the
    loss, float32. embed and head are called by all stages at once, with equal arguments. cast:
    weights, of one layer or stacked, -> the same as layers read them.
    """

    embed: Callable
    share: Callable
    layers: tuple[Callable, ...]
    head: Callable
    cast: Callable


def run(
    parts: Parts,
    batch,
    *,
    weights,
    outer: list,
    table: Table,
    placement: Placement,
    is_unrolled: bool = False,
):
    """(loss, gradients of the weights, gradients of outer), the gradients None without training.

    weights: this stage's, leaves [V, L, ...]. batch: of all microbatches, [M, rows, seq].
    is_unrolled: no loop over the layers of a chunk. Gradients are summed in float32.
    """
    store = LayerStore(placement, num_kinds=len(parts.layers), is_unrolled=is_unrolled)
    stage = _Stage(parts, batch, weights=weights, outer=outer, table=table, store=store)
    execute = _run_lean if table.shape.is_lean else _run_aligned
    carry = execute(stage, stage.first_carry())
    if not table.shape.is_training:
        return carry["loss"], None, None
    return carry["loss"], store.for_sums.joined(carry["weights"]), carry["outer"]


class _Stage:
    """The ops of one stage. They take what is carried, and give back the parts that they change."""

    def __init__(self, parts: Parts, batch, *, weights, outer: list, table: Table, store):
        self.parts, self.batch, self.weights, self.outer = parts, batch, weights, outer
        self.table, self.store = table, store
        self.index = jax.lax.axis_index(STAGE)
        # Whether the weights of the chunk at hand are kept apart, for all the microbatches that go
        # through it one after the other. Cut out in each block they are 1.7 of the 12 GB that
        # element-wise kernels move for a layer of 8B (2 stages, `gemms`).
        self.keeps_chunks = store.placement.num_chunks > 1 and not table.shape.is_lean
        self.apart = [] if self.keeps_chunks else store.apart(parts.cast(weights))
        first = self.microbatch(0)
        self.first_x = parts.embed(outer, first)
        row = dict(chunk=0, weights=self.chunk(0)) if self.keeps_chunks else dict(chunk=0)
        shared, some = parts.share(first), self.weights_at(row, store.place(0, 0))
        self.layers = [
            LayerGradients(
                layer,
                some,
                x=self.first_x,
                shared=shared,
                splits=table.shape.splits_gradients,
                wide=SUM if store.adds_whole_leaves else None,
            )
            for layer in parts.layers
        ]
        self.read_by_embed = _read_by(lambda outer: parts.embed(outer, first), outer)
        self.read_by_head = _read_by(lambda outer: parts.head(outer, self.first_x, first), outer)
        self.ops = {
            Kind.FORWARD: self.forward,
            Kind.INPUT_GRADIENT: self.input_gradient,
            Kind.WEIGHT_GRADIENT: self.weight_gradient,
            Kind.BACKWARD: self.backward,
        }

    def first_carry(self) -> dict[str, Any]:
        """x: embedded for the first stage's next forward op. sent_*: what an op has to send on."""
        x_type, depth = jax.typeof(self.first_x), buffers(self.table).depth
        carry = dict(
            x=self.first_x,
            loss=jnp.zeros((), jnp.float32),
            forward=zeros(x_type, depth["forward"] + 1),
            sent_forward=zeros(x_type),
            chunks=self.room_for_chunks() if self.keeps_chunks else {},
        )
        if not self.table.shape.is_training:
            return carry
        residuals, crossing = (
            self.store.slots([getattr(layer, name) for layer in self.layers], depth=depth[name])
            for name in ("residuals", "crossing")
        )
        return carry | dict(
            backward=zeros(x_type, depth["backward"] + 1),
            loss_gradient=zeros(x_type, depth["loss"] + 1),
            sent_backward=zeros(x_type),
            residuals=residuals,
            crossing=crossing,
            weights=jax.tree.map(
                lambda leaf: zeros(jax.typeof(leaf), dtype=SUM),
                self.store.for_sums.apart(self.weights),
            ),
            outer=[zeros(jax.typeof(leaf)) for leaf in self.outer],
        )

    def microbatch(self, number):
        return jax.tree.map(lambda leaf: at(leaf, number), self.batch)

    def weights_at(self, row, place: Place):
        """A layer's of the row's chunk, which comes with the row where chunks are kept."""
        if self.keeps_chunks:
            return layer_store.read(row["weights"], place, first=())
        return layer_store.read(self.apart, place, first=self.store.of_chunk(row["chunk"]))

    def chunk(self, number) -> list:
        """A store of its weights, cast."""
        return self.parts.cast(self.store.chunk(self.weights, number))

    def room_for_chunks(self) -> dict[Kind, list]:
        """For the ops of each kind, a store of one chunk's weights."""
        room = jax.tree.map(lambda leaf: zeros(jax.typeof(leaf)), self.chunk(0))
        return dict.fromkeys(self.table.shape.kinds, room)

    def chunk_at_hand(self, before: list, row) -> list:
        """The weights of the op's chunk: those `before`, unless it is another."""

        def cut_out(state):
            return jnp.int32(-1), self.chunk(state[0])

        # A loop of one turn or none, as in `_when`. The number changes in it, or XLA would cut the
        # weights out before the loop, and always.
        number = jnp.where(row["is_other_chunk"], row["chunk"], -1)
        return jax.lax.while_loop(lambda state: state[0] >= 0, cut_out, (number, before))[1]

    def is_here(self, chunk, layer):
        """Whether there is such a layer: the last chunks may be short of some."""
        placement = self.store.placement
        return placement.number_of(layer, chunk=chunk, stage=self.index) < placement.num_layers

    def if_here(self, chunk, layer, *, then, otherwise):
        if self.store.placement.is_full:
            return then
        return jnp.where(self.is_here(chunk, layer), then, otherwise)

    # Ops.

    def forward(self, carry, row):
        reads_embedding = (self.index == 0) & (row["chunk"] == 0)
        x = jnp.where(reads_embedding, carry["x"], at(carry["forward"], row["reads_forward"]))
        shared = self.parts.share(self.microbatch(row["microbatch"]))
        is_training = self.table.shape.is_training

        def turn(carried, number):
            x, kept = carried
            for kind, layer in enumerate(self.layers):
                place = self.store.place(number, kind)
                y, residuals = layer.forward(self.weights_at(row, place), x, shared=shared)
                layer_number = number * len(self.layers) + kind
                x = self.if_here(row["chunk"], layer_number, then=y, otherwise=x)
                if is_training:
                    slot = (row["reads_residuals"],)
                    kept = layer_store.write(kept, place, values=residuals, first=slot)
            return x, kept

        x, kept = self.store.over_turns(turn, (x, carry["residuals"] if is_training else []))
        return dict(sent_forward=x, residuals=kept) if is_training else dict(sent_forward=x)

    def backward(self, carry, row):
        dx, total = self._back(
            carry, row, gradients=LayerGradients.backward, into="weights", collect=self._added
        )
        return dict(sent_backward=dx, weights=total)

    def input_gradient(self, carry, row):
        def keep(kept, place, *, values, row, layer):
            del layer
            return layer_store.write(kept, place, values=values, first=(row["reads_crossing"],))

        dx, kept = self._back(
            carry, row, gradients=LayerGradients.input_gradient, into="crossing", collect=keep
        )
        return dict(sent_backward=dx, crossing=kept)

    def _back(self, carry, row, *, gradients: Callable, into: str, collect: Callable):
        """(gradient of the chunk's input, what `collect` makes of the layers' other results).

        Zeros go in where the stage has nothing to do, so that all gradients are zeros: products
        that are not looked at afterwards can be added to sums where these are.
        """
        shape = self.table.shape
        is_last = (self.index == shape.num_stages - 1) & (row["chunk"] == shape.num_chunks - 1)
        of_loss = at(carry["loss_gradient"], row["reads_loss"])
        dy = jnp.where(is_last, of_loss, at(carry["backward"], row["reads_backward"]))
        dy = _where(row["is_active"], dy)
        shared = self.parts.share(self.microbatch(row["microbatch"]))

        def turn(carried, number):
            dy, total = carried
            for kind, layer in reversed([*enumerate(self.layers)]):
                place = self.store.place(number, kind)
                residuals = self._residuals(carry, row, place=place)
                weights = self.weights_at(row, place)
                dx, other = gradients(layer, weights, residuals, shared=shared, dy=dy)
                layer_number = number * len(self.layers) + kind
                total = collect(total, place, values=other, row=row, layer=layer_number)
                dy = self.if_here(row["chunk"], layer_number, then=dx, otherwise=dy)
            return dy, total

        return self.store.over_turns(turn, (dy, carry[into]), reverse=True)

    def weight_gradient(self, carry, row):
        shared = self.parts.share(self.microbatch(row["microbatch"]))

        def turn(total, number):
            for kind, layer in enumerate(self.layers):
                place = self.store.place(number, kind)
                residuals = self._residuals(carry, row, place=place)
                slot = (row["reads_crossing"],)
                crossing = layer_store.read(carry["crossing"], place, first=slot)
                crossing = [_where(row["is_active"], each) for each in crossing]
                weights = self.weights_at(row, place)
                gradients = layer.weight_gradient(
                    weights, residuals, shared=shared, crossing=crossing
                )
                number_of = number * len(self.layers) + kind
                total = self._added(total, place, values=gradients, row=row, layer=number_of)
            return total

        return dict(weights=self.store.over_turns(turn, carry["weights"], reverse=True))

    def _residuals(self, carry, row, *, place: Place):
        return layer_store.read(carry["residuals"], place, first=(row["reads_residuals"],))

    def _added(self, total: list, place: Place, *, values, row, layer) -> list:
        """The sums with a layer's gradients, if there is such a layer."""
        del place  # of its residuals

        def wanted(gradient):
            if not self.store.placement.is_full:
                gradient = _where(self.is_here(row["chunk"], layer), gradient)
            return gradient.astype(SUM)

        mine, chunk = self.store.for_sums.place(layer, 0), self.store.of_chunk(row["chunk"])
        return layer_store.add(total, mine, values=jax.tree.map(wanted, values), first=chunk)

    # What all stages do together.

    def head(self, carry, number):
        """The microbatch's part of the loss, and its gradients."""
        is_last = self.index == self.table.shape.num_stages - 1
        sent = carry["sent_forward"]
        x = _sum_over_stages(_where(is_last, sent))
        microbatch = self.microbatch(number)

        def loss_of(read, x):
            return self.parts.head(self._outer_with(self.read_by_head, read), x, microbatch)

        read = [self.outer[place] for place in self.read_by_head]
        if not self.table.shape.is_training:
            return dict(loss=carry["loss"] + loss_of(read, x))
        loss, (gradients, dx) = jax.value_and_grad(loss_of, argnums=(0, 1))(read, x)
        total = _summed(carry["outer"], dict(zip(self.read_by_head, gradients, strict=True)))
        return dict(loss=carry["loss"] + loss, outer=total, made_loss=dx)

    def embed(self, number):
        return dict(x=self.parts.embed(self.outer, self.microbatch(number)))

    def embedding_gradient(self, carry, number):
        sent, microbatch = carry["sent_backward"], self.microbatch(number)
        # The transpose of the embedding's sum over stages is such a sum: it sends the first stage's
        # gradient to all, if the others give zeros.
        dx = _where(self.index == 0, sent)

        def embedded(read):
            return self.parts.embed(self._outer_with(self.read_by_embed, read), microbatch)

        _, pullback = jax.vjp(embedded, [self.outer[place] for place in self.read_by_embed])
        (gradients,) = pullback(dx)
        total = _summed(carry["outer"], dict(zip(self.read_by_embed, gradients, strict=True)))
        return dict(outer=total)

    def _outer_with(self, places: list[int], values: list) -> list:
        found = dict(zip(places, values, strict=True))
        return [found.get(place, leaf) for place, leaf in enumerate(self.outer)]

    def passed_on(self, sent, *, back: bool = False):
        """The neighbour's; the ring is closed where stages have several chunks."""
        num = self.table.shape.num_stages
        senders = range(num if self.store.placement.num_chunks > 1 else num - 1)
        ring = [(a, (a + 1) % num) for a in senders]
        return jax.lax.ppermute(sent, STAGE, [(b, a) for a, b in ring] if back else ring)


# Aligned tables.


def _run_aligned(stage: _Stage, carry):
    for repeats, runs in blocks.program(stage.table):
        rows = [_of_stage(run.rows, stage.index) for run in runs]
        sweep = functools.partial(_sweep, stage=stage, runs=runs)
        if repeats == 1:
            carry, _ = sweep(carry, _first(rows))
        else:
            carry, _ = jax.lax.scan(sweep, carry, rows)
    return carry


def _sweep(carry, rows, *, stage: _Stage, runs: list[blocks.Run]):
    for run, mine in zip(runs, rows, strict=True):
        carry = _read_before_written(carry)
        body = functools.partial(_block, stage=stage, signature=run.signature)
        if run.length == 1:
            carry, _ = body(carry, _first(mine))
        else:
            carry, _ = jax.lax.scan(body, carry, mine)
    return carry, None


def _read_before_written(carry):
    """The same; what a block writes to the stash waits for what blocks before read of it.

    Nothing else orders the two, and XLA would copy the stash: of 8B, 2 stages of 4 chunks, 31 GB in
    each turn of the loop, and 19 GiB more.
    """
    names = carry.keys() & {"residuals", "crossing", "weights", "chunks", "sent_backward"}
    return carry | jax.lax.optimization_barrier({name: carry[name] for name in sorted(names)})


def _first(rows):
    return jax.tree.map(lambda leaf: leaf[0], rows)


def _of_stage(rows, index):
    """This stage's column of each."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[..., index], rows)


def _block(carry, row, *, stage: _Stage, signature: blocks.Signature):
    """Consecutive ticks of the kinds there are; messages run beside what comes after them."""
    # Else XLA makes the indices anew inside of each kernel, and no longer sees which are equal.
    row = jax.lax.optimization_barrier(row)
    chunks = {
        kind: stage.chunk_at_hand(carry["chunks"][kind], row[kind.name])
        for kind in signature.kinds
        if kind in carry["chunks"]
    }
    # Before all else: beside a loop of no turn a message gets nowhere.
    row, chunks = jax.lax.optimization_barrier((row, chunks))
    carry = carry | dict(chunks=carry["chunks"] | chunks)
    if signature.receives:
        # Sent at the end of the block before, and on its way beside this block's forward op.
        arrived = stage.passed_on(carry["sent_backward"], back=True)
        carry = carry | dict(backward=put(carry["backward"], arrived, index=(row["receives"],)))
    for kind in signature.kinds:
        mine = row[kind.name]
        if kind in chunks:
            mine = mine | dict(weights=chunks[kind])
        carry = carry | stage.ops[kind](carry, mine)
        if kind == Kind.FORWARD:
            arrived = stage.passed_on(carry["sent_forward"])
            slot = (mine["arrives_forward"],)
            carry = carry | dict(forward=put(carry["forward"], arrived, index=slot))
            if signature.has_embedding:
                carry = carry | stage.embed(row["embedding"])
            if signature.has_head:
                carry = carry | stage.head(carry, row["head"])
            if "made_loss" in carry:
                made, slot = carry.pop("made_loss"), (mine["arrives_loss"],)
                carry = carry | dict(loss_gradient=put(carry["loss_gradient"], made, index=slot))
        elif kind in blocks.GRADIENTS and signature.has_embedding_gradient:
            carry = carry | stage.embedding_gradient(carry, row["embedding_gradient"])
    return carry, None


# Lean tables.


def _run_lean(stage: _Stage, carry):
    """Each stage enters its own op: a loop of one turn or none."""
    table = stage.table
    rows = blocks.columns(table) | dict(kind=table.kind)
    for name, numbers in blocks.together(table).items():
        column = np.array([numbers.get(tick, -1) for tick in range(len(table.kind))], np.int32)
        rows[name] = np.repeat(column[:, None], table.shape.num_stages, axis=1)
    if table.shape.is_training:
        carry = carry | dict(made_loss=jnp.zeros_like(carry["x"]))
    tick = functools.partial(_tick, stage=stage)
    return jax.lax.scan(tick, carry, _of_stage(rows, stage.index))[0]


def _tick(carry, row, *, stage: _Stage):
    shape = stage.table.shape
    for kind in shape.kinds:
        op = functools.partial(stage.ops[kind], row=row)
        carry = _when(row["kind"] == kind, op, carry=carry)
    head, embedding, number = row["head"], row["embedding"], row["embedding_gradient"]
    carry = _when(head >= 0, lambda carry: stage.head(carry, head), carry=carry)
    carry = _when(embedding >= 0, lambda _: stage.embed(embedding), carry=carry)
    arrived = stage.passed_on(carry["sent_forward"])
    slot = (row["arrives_forward"],)
    carry = carry | dict(forward=put(carry["forward"], arrived, index=slot))
    if not shape.is_training:
        return carry, None
    carry = _when(number >= 0, lambda c: stage.embedding_gradient(c, number), carry=carry)
    arrived = stage.passed_on(carry["sent_backward"], back=True)
    slots = (row["arrives_backward"],), (row["arrives_loss"],)
    carry = carry | dict(
        backward=put(carry["backward"], arrived, index=slots[0]),
        loss_gradient=put(carry["loss_gradient"], carry["made_loss"], index=slots[1]),
    )
    return carry, None


def _when(predicate, function: Callable, *, carry):
    """The carry with `function(carry)`'s parts in it, where the predicate holds.

    A loop writes its carry in place. A conditional copies it, in every branch: the whole stash.
    """

    def body(state):
        return jnp.bool_(False), state[1] | function(state[1])

    return jax.lax.while_loop(lambda state: state[0], body, (predicate, carry))[1]


def _where(counts, x):
    return jnp.where(counts, x, jnp.zeros((), x.dtype))


def _sum_over_stages(x):
    """Of arrays all but one of which are zeros: nothing is rounded."""

    def wide(x):
        # XLA aborts on such a bfloat16 sum on CPUs (0.10.2 and 0.11.2): "Invalid binary instruction
        # opcode copy".
        return jax.lax.psum(x.astype(jnp.float32), STAGE).astype(x.dtype)

    return jax.lax.platform_dependent(x, cpu=wide, default=lambda x: jax.lax.psum(x, STAGE))


# Arrays of no layer.


def _read_by(function: Callable, outer: list) -> list[int]:
    """The numbers of those arrays that the function reads."""
    jaxpr = jax.make_jaxpr(function)(outer).jaxpr
    read = {id(var) for eqn in jaxpr.eqns for var in eqn.invars}
    return [number for number, var in enumerate(jaxpr.invars) if id(var) in read]


def _summed(total: list, gradients: dict[int, Any]) -> list:
    return [
        leaf + gradients[place].astype(leaf.dtype) if place in gradients else leaf
        for place, leaf in enumerate(total)
    ]
