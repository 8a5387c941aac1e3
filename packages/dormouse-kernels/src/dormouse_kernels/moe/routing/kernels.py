"""Kernels that sort slots by expert and cut every expert's rows into tiles: a counting sort in three launches.

R slots t·k + j, E experts. Bin e < E holds expert e's slots, bin E the sentinels (an index outside [0, E)), bin E + 1
the overhang of the last block. Integers only, and every rank is counted, so the order is stable and the same every run.
"""

import triton
import triton.language as tl

from dormouse_kernels.dependents import after_previous
from dormouse_kernels.offsets import row_offset

OF_T = ("R", "blocks", "max_tiles")
"""Numbers that grow with the tokens: a divisibility of theirs must not compile another kernel."""


@triton.jit
def slot_bins(index_ptr, slot, R, E):
    """The bin of each slot."""
    expert = tl.load(index_ptr + slot, mask=slot < R, other=-1)
    # compared before it is narrowed: an int64 index far outside must not wrap into range
    bins = tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)
    return tl.where(slot < R, bins, E + 1)


@triton.jit(do_not_specialize=OF_T)
def count_blocks(index_ptr, hist_ptr, arrived_ptr, R, E, BINS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """hist[block, bin] = slots of the block in the bin. Also clears the arrival counter of `scan_bins`."""
    after_previous(PDL)
    block = tl.program_id(0)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    counts = tl.histogram(slot_bins(index_ptr, slot, R, E), BINS)
    tl.store(hist_ptr + row_offset(block, BINS) + tl.arange(0, BINS), counts)
    if block == 0:
        tl.store(arrived_ptr, 0)


@triton.jit(do_not_specialize=OF_T)
def scan_bins(
    hist_ptr, total_ptr, arrived_ptr, counts_ptr, offsets_ptr, tile_start_ptr, long_ptr, E, blocks,
    BINS: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Turns hist into its exclusive prefix over blocks; the last program makes offsets and tiles of the totals.

    long[0] is the number of experts with more than one tile, long[1:] are they and then the others, ascending.
    """
    after_previous(PDL)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    carry = tl.zeros([COLS], tl.int32)
    for first in range(0, blocks, ROWS):
        row = first + tl.arange(0, ROWS)
        at = hist_ptr + row_offset(row, BINS)[:, None] + col[None, :]
        counts = tl.load(at, mask=row[:, None] < blocks, other=0)
        tl.store(at, tl.cumsum(counts, 0) - counts + carry[None, :], mask=row[:, None] < blocks)
        carry += tl.sum(counts, 0)
    tl.store(total_ptr + col, carry)
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.debug_barrier()
        e = tl.arange(0, BINS)
        n = tl.load(total_ptr + e, cache_modifier=".cg")
        tl.store(counts_ptr + e, n.to(tl.int64), mask=e < E)
        tl.store(offsets_ptr + e, (tl.cumsum(n, 0) - n).to(tl.int64), mask=e <= E)
        store_starts(n, e, tile_start_ptr, long_ptr, E, TILE)


@triton.jit
def store_starts(n, e, tile_start_ptr, long_ptr, E, TILE: tl.constexpr):
    """Each bin's first tile, and the experts of several tiles, from the bins' counts n; e is arange."""
    # an expert without rows has a tile too: a program must exist to write its zeros
    tiles = (n + TILE - 1) // TILE
    tiles = tl.where(e < E, tl.maximum(tiles, 1), tl.where(e == E, tiles, 0))
    tl.store(tile_start_ptr + e, tl.cumsum(tiles, 0) - tiles, mask=e <= E + 1)
    is_long = ((tiles > 1) & (e < E)).to(tl.int32)
    longs = tl.sum(is_long, 0)
    before = tl.cumsum(is_long, 0)
    tl.store(long_ptr + tl.where(is_long > 0, before, longs + e + 1 - before), e, mask=e < E)
    tl.store(long_ptr, longs)


@triton.jit(do_not_specialize=OF_T)
def start_tiles(offsets_ptr, tile_start_ptr, long_ptr, R, E, BINS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    """`store_starts` of rows that are sorted already; one program."""
    after_previous(PDL)
    e = tl.arange(0, BINS)
    begin = tl.load(offsets_ptr + e, mask=e <= E, other=0)
    end = tl.load(offsets_ptr + e + 1, mask=e < E, other=R)
    store_starts(tl.where(e <= E, end - begin, 0).to(tl.int32), e, tile_start_ptr, long_ptr, E, TILE)


@triton.jit(do_not_specialize=OF_T)
def map_experts(
    offsets_ptr, tile_start_ptr, map_ptr, R, E, max_tiles,
    TILE: tl.constexpr, EXPERTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The map of the tiles that `start_tiles` counted."""
    after_previous(PDL)
    parts = tl.num_programs(0)
    map_part(offsets_ptr, tile_start_ptr, map_ptr, tl.program_id(0), parts, R, E, max_tiles, TILE, EXPERTS)


@triton.jit(do_not_specialize=OF_T)
def place_slots(
    index_ptr, hist_ptr, offsets_ptr, tile_start_ptr, order_ptr, inverse_ptr, map_ptr, R, E, blocks, max_tiles,
    BINS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, EXPERTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first `blocks` programs place a block of slots each, the others map the tiles of EXPERTS experts each."""
    after_previous(PDL)
    program = tl.program_id(0)
    if program < blocks:
        place_block(index_ptr, hist_ptr, offsets_ptr, order_ptr, inverse_ptr, program, R, E, BINS, BLOCK)
    else:
        parts = tl.num_programs(0) - blocks
        map_part(offsets_ptr, tile_start_ptr, map_ptr, program - blocks, parts, R, E, max_tiles, TILE, EXPERTS)


@triton.jit
def place_block(
    index_ptr, hist_ptr, offsets_ptr, order_ptr, inverse_ptr, block, R, E, BINS: tl.constexpr, BLOCK: tl.constexpr
):
    """Places a block of slots: each after its bin's earlier blocks and its bin's earlier slots of this block."""
    lane = tl.arange(0, BLOCK)
    slot = block * BLOCK + lane
    bins = slot_bins(index_ptr, slot, R, E)
    before = tl.load(hist_ptr + row_offset(block, BINS) + bins)
    start = tl.load(offsets_ptr + bins, mask=bins <= E, other=0).to(tl.int32)
    rank = tl.zeros([BLOCK], tl.int32)
    # not unrolled: 32 comparisons a thread at a time are enough registers
    for first in tl.range(0, BLOCK, 32, loop_unroll_factor=1):
        earlier = first + tl.arange(0, 32)
        same = bins[:, None] == slot_bins(index_ptr, block * BLOCK + earlier, R, E)[None, :]
        rank += tl.sum((same & (earlier[None, :] < lane[:, None])).to(tl.int32), 1)
    position = start + before + rank
    tl.store(order_ptr + position, slot.to(order_ptr.dtype.element_ty), mask=slot < R)
    tl.store(inverse_ptr + slot, position.to(inverse_ptr.dtype.element_ty), mask=slot < R)


@triton.jit
def map_part(
    offsets_ptr, tile_start_ptr, map_ptr, part, parts, R, E, max_tiles, TILE: tl.constexpr, EXPERTS: tl.constexpr
):
    """map[tile] = (expert, first row, end row, tiles of the expert) for every tile of the part's EXPERTS experts.

    Expert E holds sentinels; the tiles that no expert has, shared by the parts, get expert -1 and zeros.
    """
    used = tl.load(tile_start_ptr + E + 1)
    none = tl.zeros([EXPERTS], tl.int32)
    for start in range(part * EXPERTS, max_tiles, parts * EXPERTS):
        tile = start + tl.arange(0, EXPERTS)
        spare = (tile >= used) & (tile < max_tiles)
        tl.store(map_ptr + tile * 4, none - 1, mask=spare)
        for word in tl.static_range(1, 4):
            tl.store(map_ptr + tile * 4 + word, none, mask=spare)
    expert = part * EXPERTS + tl.arange(0, EXPERTS)
    here = tl.load(tile_start_ptr + expert, mask=expert <= E, other=0)
    count = tl.load(tile_start_ptr + expert + 1, mask=expert <= E, other=0) - here
    begin = tl.load(offsets_ptr + expert, mask=expert <= E, other=0).to(tl.int32)
    end = tl.load(offsets_ptr + expert + 1, mask=expert < E, other=R).to(tl.int32)
    for j in range(tl.max(count)):
        mine = j < count
        at = map_ptr + (here + j) * 4
        first = begin + j * TILE
        tl.store(at, expert, mask=mine)
        tl.store(at + 1, first, mask=mine)
        tl.store(at + 2, tl.minimum(first + TILE, end), mask=mine)
        tl.store(at + 3, count, mask=mine)
