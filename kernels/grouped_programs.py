"""The programs of grouped products (Pallas Mosaic GPU, for Hopper).

Those of 8 bits are in `grouped_fp8.py`, the matrices' gradient is in `grouped_gradient.py`.

Two warpgroups compute, 64 lines of a tile of the result each, and a third copies. A program makes
many tiles. The operands of the next are copied while one is stored; where tiles are held, one is
stored beside the products of the next. Rows go by `grouped_visits.py`: a tile is one group's, and
what of it belongs to the next is not stored.

T rows (tokens), E groups (experts), K rows and N columns of a matrix.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxscale.kernels import hopper, varying
from jaxscale.kernels.grouped_visits import ALIGNED, TILE_T, visits_of
from jaxscale.kernels.hopper import WARPGROUPS, arrive_if, run, wait_if, zeros

LANES = 128  # bytes of a line of a tile of an operand
BLOCK = LANES // 2  # of what is summed, in one tile of bfloat16
# Each makes one tile of the result after the other, whose operands are copied while the one before
# is stored.
PROGRAMS = hopper.MULTIPROCESSORS
# Of 65,536 a multiprocessor has; 128 threads a warpgroup, and no more than 504 for the three.
REGISTERS, REGISTERS_TO_COPY = 232, 40
# Parts of 128 bytes of a tile's lines that are stored at once. A tile that is held has a store
# beside every second product: half as many fences as with one part beside each, and TMA has read
# the parts before by then. The matrices' gradient takes 105 us instead of 114 to 117 so on an H200
# (64 groups of 256 rows); with stores beside the first two products 114 (docs/kernels_record.md).
STORED_PARTS = 2
PRODUCTS_A_STORE = 2
# Rows that one store has; a tile's rows of any number are some of these, each once.
STORED_ROWS = (64, 32, 16, 8, 4, 2, 1)


class Tiles(NamedTuple):
    """How the work is cut up.

    Columns for which a matrix has half as many, or fewer, make zeros of x's gradient on a card.
    """

    columns: int = 256  # of the result
    stages: int = 4  # tiles of both operands in shared memory: 48 KiB each, beside 32 of results
    together: int = 8  # tiles of columns made one after the other for one tile of rows
    # A tile is kept, in bfloat16, and stored beside the products of the next: 64 registers more.
    is_held: bool = False


# The widest first. With 256 columns an operand's byte is used most often; a narrower tile is taken
# where less of its last one would lie outside of the matrix.
COLUMNS = (256, 192, 128, 64)
STAGES = {256: 4, 192: 4, 128: 6, 64: 8}
# Rows a group, on average, from which on tiles are held: 3 to 6% faster with 1,024 of them, and up
# to 5% slower with 256 (docs/kernels.md).
HELD_ROWS = 512


def tiles_for(columns: int) -> Tiles:
    """Those for results of so many columns."""
    width = min(COLUMNS, key=lambda width: -(-columns // width) * width)
    return Tiles(columns=width, stages=STAGES[width])


def multiply(x_TK, w_EKN, *, group_sizes_E, is_transposed: bool, tiles: Tiles | None = None):
    """x's rows times their group's matrix, [T, N]; or times its transpose, of x [T, N]: [T, K]."""
    columns = w_EKN.shape[1] if is_transposed else w_EKN.shape[2]
    is_held = len(x_TK) >= HELD_ROWS * len(w_EKN)
    visits = visits_of(group_sizes_E, num_rows=len(x_TK))
    return launch(
        functools.partial(Product, is_transposed=is_transposed),
        (x_TK, w_EKN, *visits),
        tiles=tiles or tiles_for(columns)._replace(is_held=is_held),
        columns=columns,
        out_dtype=x_TK.dtype,
        is_transposed=is_transposed,
    )


def launch(program, operands, *, tiles: Tiles, columns: int, out_dtype, is_transposed: bool):
    """[T, columns] by `Product`, or what is made of it; operands: x, w, `Visits`, and its own."""
    x, w, visits, *_ = operands
    programs = min(PROGRAMS, len(visits) * -(-columns // tiles.columns))
    block = LANES // x.dtype.itemsize
    w_tile = (tiles.columns, block) if is_transposed else (block, tiles.columns)

    # Its name is the kernel's, in programs and traces.
    def grouped_matmul(*refs, **scratch):
        run(program(*refs, **scratch, tiles=tiles, programs=programs))

    kernel = kernel_of(
        grouped_matmul,
        jax.ShapeDtypeStruct((len(x), columns), out_dtype),
        scratch=scratch_of(tiles, ((TILE_T, block), w_tile), like=(x, w), out_dtype=out_dtype),
        programs=programs,
    )
    # The barrier as in `flash_forward`: in a scan XLA would run the kernel twice.
    return varying.as_operands(lax.optimization_barrier(kernel(*operands)), *operands)


def kernel_of(body: Callable, out_type, *, scratch: dict[str, Any], programs: int) -> Callable:
    """The kernel of so many programs of two warpgroups that compute and one that copies."""
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=(programs,),
        grid_names=("program",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
    )


def scratch_of(tiles: Tiles, operands, *, like, out_dtype) -> dict[str, Any]:
    """Shared memory and barriers of the kernels; operands: the shapes of a tile of each."""
    lanes = LANES // jnp.dtype(out_dtype).itemsize

    def tiles_of(shape, array):
        tiled = plgpu.TilingTransform((8, LANES // array.dtype.itemsize))
        transforms = tiled, plgpu.SwizzleTransform(LANES)
        return plgpu.SMEM((tiles.stages, *shape), array.dtype, transforms=transforms)

    lhs, rhs = map(tiles_of, operands, like)
    return dict(
        lhs_tiles=lhs,
        rhs_tiles=rhs,
        parts=plgpu.SMEM(
            (WARPGROUPS, STORED_PARTS, 64, lanes), out_dtype, transforms=_by_row(lanes)
        ),
        loaded=plgpu.Barrier(num_arrivals=2, num_barriers=tiles.stages),
        used=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=tiles.stages),
    )


def _by_row(lanes: int):
    """Swizzled rows of 128 bytes that are not tiles of 8: any number of them can be stored.

    By the address in shared memory, which is what TMA goes by too.
    """
    return plgpu.TilingTransform((1, lanes)), plgpu.SwizzleTransform(128)


class Work(NamedTuple):
    """One tile of the result, for the warpgroup that asks.

    first: the first row of x; begin, end: the rows that count. line, column: the first of the
    result's. stored: which of the warpgroup's own 64 lines, from and to. num_blocks: of the sum.
    num_rows: of all groups, where `mask` asks for them.
    """

    group: Any
    first: Any
    begin: Any
    end: Any
    column: Any
    line: Any
    stored: tuple[Any, Any]
    num_blocks: Any
    num_rows: Any = None


class Made(NamedTuple):
    """The warpgroup's lines of a tile that was made, with what `Work` says of them.

    values: [64, columns], in one or more parts of as many columns.
    """

    values: list[Any]
    group: Any
    line: Any
    column: Any
    stored: tuple[Any, Any]


def own_lines():
    """Of 128, the warpgroup's 64."""
    return pl.ds(lax.axis_index("warpgroup") * 64, 64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Makes tiles of the result, one after the other; their operands are copied ahead of them."""

    lhs_tiles: Any
    rhs_tiles: Any
    parts: Any
    loaded: Any
    used: Any
    tiles: Tiles
    programs: int

    def num_tiles(self) -> Any:
        raise NotImplementedError

    def entries(self, i) -> tuple[Any, ...]:
        """What memory tells of tile i of the result."""
        raise NotImplementedError

    def work(self, i, entries) -> Work:
        raise NotImplementedError

    def sources(self, work, i) -> tuple[Any, Any]:
        """Block i of both operands, in memory."""
        raise NotImplementedError

    def operands(self, slot) -> tuple[Any, Any]:
        """Of a warpgroup's product, in shared memory."""
        raise NotImplementedError

    def mask(self, work, i, *, slot) -> None:
        """Before block i is multiplied."""

    def make(self, work, count, *, before: Made | None) -> Made | None:
        """The warpgroup's lines of a tile; count: blocks of the sum before it.

        Where tiles are held, `before` is stored meanwhile and what is returned is not yet.
        """
        sums = self.sums(work, count, before=before)
        made = Made(sums, work.group, work.line, work.column, work.stored)
        if before is None:
            self.store(made)
            return None
        return held(made)

    def target(self, lines, columns, *, made: Made) -> Any:
        raise NotImplementedError

    def copy(self):
        """Loads tiles of the operands, `stages` ahead at most."""
        plgpu.set_max_registers(REGISTERS_TO_COPY, action="decrease")

        def load_tiles(work, count, *, before):
            @pl.loop(0, work.num_blocks)
            def load_block(i):
                slot, is_reused = self.slot(count + i), count + i >= self.tiles.stages
                wait_if(is_reused, self.used.at[slot])
                targets = self.lhs_tiles.at[slot], self.rhs_tiles.at[slot]
                for source, target in zip(self.sources(work, i), targets, strict=True):
                    plgpu.copy_gmem_to_smem(source, target, self.loaded.at[slot])

        count, _ = self.each(load_tiles)

        # Nothing of a barrier may be left to wait for: the interpreter says so.
        @pl.loop(jnp.maximum(0, count - self.tiles.stages), count)
        def wait_for_block(i):
            plgpu.barrier_wait(self.used.at[self.slot(i)])

    def compute(self):
        plgpu.set_max_registers(REGISTERS, action="increase")
        _, last = self.each(self.make, nothing(self.tiles) if self.tiles.is_held else None)
        self.store(last)
        plgpu.wait_smem_to_gmem(0)

    def each(self, do, made: Made | None = None):
        """`made = do(work, count, before=made)` for this program's tiles.

        count: blocks of the sum before a tile. Returns those of all tiles, and the last `made`.
        """
        number, num_tiles = lax.axis_index("program"), self.num_tiles()

        def one(i, carry):
            count, entries, made = carry
            tile = number + i * self.programs
            work = self.work(tile, entries)
            # Asked for before this tile is made: memory takes as long as a block's product.
            entries = self.entries(jnp.minimum(tile + self.programs, num_tiles - 1))
            made = do(work, count, before=made)
            return count + work.num_blocks, entries, made

        mine = lax.div(num_tiles + self.programs - 1 - number, self.programs)
        first = jnp.minimum(number, jnp.maximum(num_tiles - 1, 0))
        count, _, made = lax.fori_loop(0, mine, one, (jnp.int32(0), self.entries(first), made))
        return count, made

    def slot(self, i):
        return lax.rem(i, self.tiles.stages)

    def sums(self, work, count, *, before: Made | None) -> list[Any]:
        """float32 [64, columns], in one or more parts of as many columns.

        `before` is stored beside products.
        """
        stores = self.stores(before)

        def add_up(sums):
            @pl.loop(0, work.num_blocks)
            def add(i):
                slot = self.slot(count + i)
                plgpu.barrier_wait(self.loaded.at[slot])
                self.mask(work, i, slot=slot)
                plgpu.wgmma(sums, *self.operands(slot))
                for number, store in enumerate(stores):
                    pl.when(i == PRODUCTS_A_STORE * number)(store)
                # The product before this one has been made then, and its tiles are free.
                plgpu.wgmma_wait(1)
                used = self.slot(count + i + self.tiles.stages - 1)
                arrive_if(i > 0, self.used.at[used])

            made = sums[...]
            last = self.slot(count + work.num_blocks + self.tiles.stages - 1)
            arrive_if(work.num_blocks > 0, self.used.at[last])
            return made

        made = pl.run_scoped(add_up, plgpu.ACC((64, self.tiles.columns), jnp.float32))
        for number, store in enumerate(stores):
            pl.when(work.num_blocks <= PRODUCTS_A_STORE * number)(store)
        return [made]

    def store(self, made: Made | None):
        for store in self.stores(made):
            store()

    def stores(self, made: Made | None) -> list[Callable[[], None]]:
        """Each stores some parts of 128 bytes of each line; in this order."""
        if made is None:
            return []
        parts = range(self.tiles.columns // self.parts.shape[-1])
        return [
            functools.partial(self.store_parts, made, parts[first : first + STORED_PARTS])
            for first in parts[::STORED_PARTS]
        ]

    def store_parts(self, made: Made, numbers: Sequence[int]) -> None:
        """These parts of each line of `made.stored`."""
        lanes = self.parts.shape[-1]
        parts = self.parts.at[lax.axis_index("warpgroup")]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for slot, number in enumerate(numbers):
            which, first = divmod(number * lanes, made.values[0].shape[1])
            values = made.values[which][:, first : first + lanes]
            parts.at[slot][...] = values.astype(parts.dtype)
        plgpu.commit_smem()

        def copy(begin, size):
            lines = pl.ds(made.line + own_lines().start + begin, size)
            for slot, number in enumerate(numbers):
                columns = pl.ds(pl.multiple_of(made.column + number * lanes, lanes), lanes)
                target = self.target(lines, columns, made=made)
                part = parts.at[slot, pl.ds(begin, size)]
                plgpu.copy_smem_to_gmem(part, target, commit_group=False)

        begin, end = made.stored
        for size in STORED_ROWS:
            left = end - begin
            pl.when(left & size != 0)(functools.partial(copy, begin, size))
            begin += left & size
        plgpu.commit_smem_to_gmem_group()


def nothing(tiles: Tiles) -> Made:
    """What is before the first tile, where tiles are held: no lines to store."""
    zero = jnp.int32(0)
    return Made([zeros(tiles.columns, jnp.bfloat16)], zero, zero, zero, (zero, zero))


def held(made: Made) -> Made:
    """As a loop carries it, from `nothing` on."""
    group, line, column, stored = jax.tree.map(jnp.int32, made[1:])
    return Made([part.astype(jnp.bfloat16) for part in made.values], group, line, column, stored)


@dataclasses.dataclass(frozen=True)
class Product(Program):
    """The program of `multiply`. w: [E, K, N]; visits and counts: `Visits`."""

    x: Any
    w: Any
    visits: Any
    counts: Any
    out: Any
    _: dataclasses.KW_ONLY
    is_transposed: bool

    @property
    def block(self) -> int:
        return self.lhs_tiles.shape[-1]

    @property
    def num_columns(self) -> int:
        return -(-self.out.shape[1] // self.tiles.columns)

    def num_visits(self):
        return self.counts[self.w.shape[0]]

    def num_tiles(self):
        return self.num_visits() * self.num_columns

    def place(self, i):
        """(tile of rows, tile of columns), so ordered that those made at once share operands."""
        shape = self.num_visits(), self.num_columns
        return plgpu.planar_snake(i, shape, 1, self.tiles.together)

    def entries(self, i):
        tile, _ = self.place(i)
        return tuple(self.visits[tile, i] for i in range(4))

    def work(self, i, entries) -> Work:
        (_, column), (group, first, begin, end) = self.place(i), entries
        first = pl.multiple_of(first, ALIGNED)
        own = first + own_lines().start
        has_product = group < self.w.shape[0]
        return Work(
            group=group,
            first=first,
            begin=begin,
            end=end,
            column=column * self.tiles.columns,
            line=first,
            stored=(jnp.clip(begin - own, 0, 64), jnp.clip(end - own, 0, 64)),
            num_blocks=jnp.where(has_product, self.x.shape[1] // self.block, 0),
        )

    def sources(self, work, i):
        columns = pl.ds(work.column, self.tiles.columns)
        summed = pl.ds(i * self.block, self.block)
        place = (columns, summed) if self.is_transposed else (summed, columns)
        return self.x.at[pl.ds(work.first, TILE_T), summed], self.w.at[(work.group, *place)]

    def operands(self, slot):
        w_tile = self.rhs_tiles.at[slot]
        if self.is_transposed:
            w_tile = w_tile.transpose((1, 0))
        return self.lhs_tiles.at[slot, own_lines()], w_tile

    def make(self, work, count, *, before):
        begin, end = work.stored
        # Without rows of its own a warpgroup leaves the tensor cores to the other.
        has_rows, make = end > begin, super().make
        mine = work._replace(num_blocks=jnp.where(has_rows, work.num_blocks, 0))
        made = None
        if before is None:
            # By a branch: a sum of no blocks has products in 8 bits spill 600 bytes a thread, with
            # which they took 153 us on an H200 instead of 64 (docs/kernels.md).
            @pl.when(has_rows)
            def make_and_store() -> None:
                make(work, count, before=None)
        else:
            made = make(mine, count, before=before)

        @pl.loop(mine.num_blocks, work.num_blocks)
        def pass_block(i):
            slot = self.slot(count + i)
            plgpu.barrier_wait(self.loaded.at[slot])
            plgpu.barrier_arrive(self.used.at[slot])

        return made

    def target(self, lines, columns, *, made):
        return self.out.at[lines, columns]
