"""Taking turns: how two tiles that share a token add up its row without an expanded copy, in a fixed order.

With two experts a token, the earlier of its two tiles stores its row of a chunk of columns and raises that chunk's
flag; the later one waits for the flag and adds its own row to what it finds, still in L2. turn[row] is a row's part:
  >= 0  second: the tile to wait for        -1  first of two        -2  alone        -3  writes nothing
A program takes its place in tile order from a ticket, so whatever it waits for is already running: no order of the
hardware's is relied on. Which tile is earlier is a matter of the routing alone, so the same bits come out every run.
"""

import triton
import triton.language as tl

FIRST = tl.constexpr(-1)
ALONE = tl.constexpr(-2)
NOTHING = tl.constexpr(-3)


@triton.jit
def take_ticket(ticket_ptr):
    """This program's place in line."""
    return tl.atomic_add(ticket_ptr, 1, sem="relaxed")


@triton.jit
def program_barrier(INTERPRETED: tl.constexpr):
    """A barrier of the program's threads. `tl.debug_barrier` would keep the loop around it from being pipelined."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "bar.sync 0; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def wait_for(flag_ptrs, INTERPRETED: tl.constexpr):
    """Spins until every flag is raised. Interpreted programs run one after another: theirs are raised already."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            """{
            .reg .pred waiting;
            again:
            ld.acquire.gpu.global.u32 $0, [$1];
            setp.eq.u32 waiting, $0, 0;
            @waiting bra again;
            }""",
            "=r,l", [flag_ptrs.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def row_turns(
    slot,
    row,
    inside,
    inverse_ptr,
    index_ptr,
    offsets_ptr,
    tile_start_ptr,
    expert,
    E,
    K: tl.constexpr,
    TILE: tl.constexpr,
):
    """The turn of each row of a tile of `expert` (E: the sentinels' tile), for K of 1 or 2."""
    if K == 1:
        return tl.where(inside, ALONE, NOTHING)
    else:  # noqa: RET505 - a constexpr branch: what follows must not be compiled for K = 1
        other = tl.load(index_ptr + (slot ^ 1), mask=inside, other=-1)
        routed = (other >= 0) & (other < E)
        other = tl.where(routed, other, 0).to(tl.int32)
        position = tl.load(inverse_ptr + (slot ^ 1), mask=inside, other=0).to(tl.int32)
        start = tl.load(offsets_ptr + other).to(tl.int32)
        other_tile = tl.load(tile_start_ptr + other) + (position - start) // TILE
        mine = tl.where(routed, tl.where(position < row, other_tile, FIRST), ALONE)
        # a token with no expert at all is written once, as zeros, by its first slot
        idle = tl.where(routed | (slot % 2 == 1), NOTHING, ALONE)
        return tl.where(inside, tl.where(expert < E, mine, idle), NOTHING)


@triton.jit
def residual_of(residual_ptr, at, mask, real):
    """The residual's elements at offsets `at`, zero in columns that are not `real`."""
    # `real` is applied after the load: a mask that ends at an odd width would make the load two bytes wide
    return tl.where(real[None, :], tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32), 0.0)


@triton.jit
def store_in_turn(
    out_ptr, residual_ptr, at, value, turn, columns, real, flag_ptr, tile, raised_ptr,
    HAS_RESIDUAL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Stores `value` at offsets `at` or adds it there, by turn; the last to write a row adds the residual.

    `columns` exist in out, `real` ones in the residual. `flag_ptr`: the tiles' flags of this chunk. `raised_ptr`: a
    word that is never zero, for rows that wait for nobody.
    """
    lead = ((turn == FIRST) | (turn == ALONE))[:, None] & columns[None, :]
    if HAS_RESIDUAL:
        own = residual_of(residual_ptr, at, (turn == ALONE)[:, None] & columns[None, :], real) + value.to(tl.float32)
        tl.store(out_ptr + at, own.to(value.dtype), mask=lead)
    else:
        tl.store(out_ptr + at, value, mask=lead)
    program_barrier(INTERPRETED)
    tl.atomic_xchg(flag_ptr + tile, 1, sem="release")
    second = turn >= 0
    wait_for(tl.where(second, flag_ptr + turn, raised_ptr), INTERPRETED)
    program_barrier(INTERPRETED)
    mask = second[:, None] & columns[None, :]
    # .cg: past L1, which other programs' stores do not reach
    total = tl.load(out_ptr + at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32) + value.to(tl.float32)
    if HAS_RESIDUAL:
        total += residual_of(residual_ptr, at, mask, real)
    tl.store(out_ptr + at, total.to(value.dtype), mask=mask)
