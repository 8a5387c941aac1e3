"""Kernels that multiply sorted rows by their experts' matrices.

T tokens, k experts a token, R = T·k rows sorted by expert, E experts, b [E, K, N]. A tile is up to ROWS rows of one
expert: map[tile] = (expert, first row, end row, tiles of the expert); expert E holds sentinels, whose outputs are
zeros. A program makes COLS columns of a tile. Where a row of an operand lies: sources.py.

PERSISTENT: a program takes tile after tile, the loads of the next ahead of the results of the last (the pipeliner sees
one loop, for which every tile must have as many steps: those of idle experts run too). Otherwise a program a tile.

Rows past a tile's end read its last row instead of being masked, and are not stored: with K a multiple of DEPTH and N
of COLS the loop over K has no mask at all.
"""

import triton
import triton.language as tl

from dormouse_kernels.moe.grouped import sources
from dormouse_kernels.offsets import row_offset

SORTED = tl.constexpr(sources.SORTED)
TOKEN = tl.constexpr(sources.TOKEN)


@triton.jit
def source_of(order_ptr, row, mask, SOURCE: tl.constexpr, TOP_K: tl.constexpr):
    """The row of an operand that belongs to each sorted `row`."""
    if SOURCE == SORTED:
        return row
    else:  # noqa: RET505 - a constexpr branch: sorted rows must not load the order
        slot = tl.load(order_ptr + row, mask=mask, other=0)
        return slot // TOP_K if SOURCE == TOKEN else slot


@triton.jit
def place_of(program, max_tiles, blocks, GROUP: tl.constexpr):
    """(tile, block of columns) of a program: GROUP tiles go through their columns together, so that both stay in L2."""
    group = program // (GROUP * blocks)
    within = program % (GROUP * blocks)
    size = tl.minimum(max_tiles - group * GROUP, GROUP)
    return group * GROUP + within % size, within // size


@triton.jit
def is_idle(map_ptr, tile, E):
    """Whether a tile has no rows of an expert."""
    expert = tl.load(map_ptr + tile * 4)
    return (expert < 0) | (expert >= E) | (tl.load(map_ptr + tile * 4 + 1) >= tl.load(map_ptr + tile * 4 + 2))


@triton.jit
def contract(
    a_at, b_at, a_step, b_step, columns, K,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ_k a b in fp32 [ROWS, COLS] from pointers to the first DEPTH of K: a_at [ROWS, DEPTH], b_at [DEPTH, COLS]."""
    depth = tl.arange(0, DEPTH)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, K, DEPTH):
        if EVEN_K:
            a = tl.load(a_at)
        else:
            a = tl.load(a_at, mask=(depth < K - start)[None, :], other=0.0)
        if EVEN_K and EVEN_N:
            b = tl.load(b_at)
        elif EVEN_K:
            b = tl.load(b_at, mask=columns[None, :], other=0.0)
        else:
            b = tl.load(b_at, mask=(depth < K - start)[:, None] & columns[None, :], other=0.0)
        total = tl.dot(a, b.to(a.dtype), total, input_precision=PRECISION)
        a_at += a_step
        b_at += b_step
    return total


@triton.jit
def multiply_tile(
    a_ptr, b_ptr, out_ptr, order_ptr, map_ptr, a_row, a_col, b_expert, b_row, b_col, K, N, tile, block,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    DEPTH: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of columns of a tile of some expert."""
    expert = tl.load(map_ptr + tile * 4)
    begin = tl.load(map_ptr + tile * 4 + 1)
    end = tl.load(map_ptr + tile * 4 + 2)
    place = begin + tl.arange(0, ROWS)
    row = tl.maximum(tl.minimum(place, end - 1), 0)
    col = block * COLS + tl.arange(0, COLS)
    columns = col < N
    depth = tl.arange(0, DEPTH)
    source = source_of(order_ptr, row, place >= 0, SOURCE, TOP_K)
    a_at = a_ptr + row_offset(source, a_row)[:, None] + row_offset(depth, a_col)[None, :]
    b_at = b_ptr + row_offset(expert, b_expert) + row_offset(depth, b_row)[:, None] + row_offset(col, b_col)[None, :]
    total = contract(
        a_at, b_at, row_offset(DEPTH, a_col), row_offset(DEPTH, b_row), columns, K, ROWS, COLS, DEPTH, EVEN_K, EVEN_N,
        PRECISION,
    )  # fmt: skip
    target = row_offset(source_of(order_ptr, row, place >= 0, TARGET, TOP_K), N)
    out_at = out_ptr + target[:, None] + col[None, :]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=(place < end)[:, None] & columns[None, :])


@triton.jit
def zero_tile(
    out_ptr, order_ptr, map_ptr, N, tile, block,
    TARGET: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Zeros in a block of columns of a tile of sentinels."""
    place = tl.load(map_ptr + tile * 4 + 1) + tl.arange(0, ROWS)
    inside = place < tl.load(map_ptr + tile * 4 + 2)
    col = block * COLS + tl.arange(0, COLS)
    target = row_offset(source_of(order_ptr, place, inside, TARGET, TOP_K), N)
    zeros = tl.zeros([ROWS, COLS], out_ptr.dtype.element_ty)
    tl.store(out_ptr + target[:, None] + col[None, :], zeros, mask=inside[:, None] & (col < N)[None, :])


@triton.jit
def multiply_rows(
    a_ptr, b_ptr, out_ptr, order_ptr, map_ptr, start_ptr, a_row, a_col, b_expert, b_row, b_col, E, K, N, max_tiles,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    DEPTH: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
    PERSISTENT: tl.constexpr,
):  # fmt: skip
    """out[target of row i] = a[source of row i] · b[expert of row i]; out is [R, N], contiguous."""
    blocks = tl.cdiv(N, COLS)
    if PERSISTENT:
        tiles = tl.load(start_ptr + E)
        items = tiles * blocks
        for item in tl.range(tl.program_id(0), items, tl.num_programs(0), flatten=True):
            tile, block = place_of(item, tiles, blocks, GROUP)
            multiply_tile(
                a_ptr, b_ptr, out_ptr, order_ptr, map_ptr, a_row, a_col, b_expert, b_row, b_col, K, N, tile, block,
                SOURCE, TARGET, TOP_K, ROWS, COLS, DEPTH, EVEN_K, EVEN_N, PRECISION,
            )  # fmt: skip
        for item in range(items + tl.program_id(0), tl.load(start_ptr + E + 1) * blocks, tl.num_programs(0)):
            zero_tile(out_ptr, order_ptr, map_ptr, N, item // blocks, item % blocks, TARGET, TOP_K, ROWS, COLS)
    else:
        tile, block = place_of(tl.program_id(0), max_tiles, blocks, GROUP)
        expert = tl.load(map_ptr + tile * 4)
        if (expert < 0) | (tl.load(map_ptr + tile * 4 + 1) >= tl.load(map_ptr + tile * 4 + 2)):
            return
        if expert >= E:
            zero_tile(out_ptr, order_ptr, map_ptr, N, tile, block, TARGET, TOP_K, ROWS, COLS)
            return
        multiply_tile(
            a_ptr, b_ptr, out_ptr, order_ptr, map_ptr, a_row, a_col, b_expert, b_row, b_col, K, N, tile, block,
            SOURCE, TARGET, TOP_K, ROWS, COLS, DEPTH, EVEN_K, EVEN_N, PRECISION,
        )  # fmt: skip


@triton.jit
def halves(block, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The left and the right half of the columns of a block; both lie in the threads that hold the whole."""
    return tl.split(tl.permute(tl.reshape(block, [ROWS, 2, COLS // 2]), [0, 2, 1]))


@triton.jit
def store_gated(pre_ptr, act_ptr, gate, up, weight, row, inside, col, INNER):
    """Stores gate and up in pre, and w · silu(gate) · up in act, at columns `col` of rows `row`."""
    stored = inside[:, None] & (col < INNER)[None, :]
    pre_at = pre_ptr + row_offset(row, 2 * INNER)[:, None] + col[None, :]
    tl.store(pre_at, gate.to(pre_ptr.dtype.element_ty), mask=stored)
    tl.store(pre_at + INNER, up.to(pre_ptr.dtype.element_ty), mask=stored)
    act = gate * tl.sigmoid(gate) * up * weight[:, None]
    act_at = act_ptr + row_offset(row, INNER)[:, None] + col[None, :]
    tl.store(act_at, act.to(act_ptr.dtype.element_ty), mask=stored)


@triton.jit
def gated_tile(
    x_ptr, gate_up_ptr, weight_ptr, pre_ptr, act_ptr, order_ptr, map_ptr, x_row, bank_expert, bank_row, D, INNER,
    tile, block,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """COLS columns of the gate and as many of the up half, for a tile of some expert.

    One product of 2 COLS columns, half of them gate rows of the bank and half up rows; half of its results at a time
    go through the GLU, since all of them do not fit in the registers.
    """
    expert = tl.load(map_ptr + tile * 4)
    begin = tl.load(map_ptr + tile * 4 + 1)
    end = tl.load(map_ptr + tile * 4 + 2)
    place = begin + tl.arange(0, ROWS)
    row = tl.maximum(tl.minimum(place, end - 1), 0)
    slot = tl.load(order_ptr + row)
    pair = tl.arange(0, 2 * COLS)
    within = block * COLS + pair % COLS
    depth = tl.arange(0, DEPTH)
    a_at = x_ptr + row_offset(slot // TOP_K, x_row)[:, None] + depth[None, :]
    bank = row_offset(within + pair // COLS * INNER, bank_row)
    b_at = gate_up_ptr + row_offset(expert, bank_expert) + depth[:, None] + bank[None, :]
    total = contract(a_at, b_at, DEPTH, DEPTH, within < INNER, D, ROWS, 2 * COLS, DEPTH, EVEN_K, EVEN_N, PRECISION)
    weight = tl.load(weight_ptr + slot).to(tl.float32)
    gate, up = halves(total, ROWS, 2 * COLS)
    gate_first, gate_second = halves(gate, ROWS, COLS)
    up_first, up_second = halves(up, ROWS, COLS)
    inside = place < end
    col = block * COLS + tl.arange(0, COLS // 2)
    store_gated(pre_ptr, act_ptr, gate_first, up_first, weight, row, inside, col, INNER)
    store_gated(pre_ptr, act_ptr, gate_second, up_second, weight, row, inside, col + COLS // 2, INNER)


@triton.jit
def gated_rows(
    x_ptr, gate_up_ptr, weight_ptr, pre_ptr, act_ptr, order_ptr, map_ptr, start_ptr, x_row, bank_expert, bank_row,
    E, D, INNER, max_tiles,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """`pre = x[token] · gate_up_eᵀ` [R, 2I], gate then up; `act = w · silu(gate) · up` [R, I]."""
    blocks = tl.cdiv(INNER, COLS)
    if PERSISTENT:
        tiles = tl.load(start_ptr + E)
        for item in tl.range(tl.program_id(0), tiles * blocks, tl.num_programs(0), flatten=True):
            tile, block = place_of(item, tiles, blocks, GROUP)
            gated_tile(
                x_ptr, gate_up_ptr, weight_ptr, pre_ptr, act_ptr, order_ptr, map_ptr, x_row, bank_expert, bank_row, D,
                INNER, tile, block, TOP_K, ROWS, COLS, DEPTH, EVEN_K, EVEN_N, PRECISION,
            )  # fmt: skip
    else:
        tile, block = place_of(tl.program_id(0), max_tiles, blocks, GROUP)
        if is_idle(map_ptr, tile, E):
            return
        gated_tile(
            x_ptr, gate_up_ptr, weight_ptr, pre_ptr, act_ptr, order_ptr, map_ptr, x_row, bank_expert, bank_row, D,
            INNER, tile, block, TOP_K, ROWS, COLS, DEPTH, EVEN_K, EVEN_N, PRECISION,
        )  # fmt: skip
