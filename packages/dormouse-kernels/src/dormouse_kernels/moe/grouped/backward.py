"""Kernels of the gradients. Letters, tiles, sources and sentinels as in forward.py.

From dy = dL/dout and the saved gate g and up u of each row, with σ = sigmoid(g) and z = g σ u:
  dz~ = dy · down_e     dw = <dz~, z>     dz = w dz~     dg = dz u σ (1 + g (1 - σ))     du = dz g σ
  d down_e = Σ dyᵀ (w z)     d gate_up_e = Σ [dg du]ᵀ x     dx = [dg du] · gate_up_e
"""

import triton
import triton.language as tl

from dormouse_kernels.moe.grouped.forward import contract, halves, is_idle, place_of, source_of
from dormouse_kernels.offsets import row_offset


@triton.jit
def through_gate(
    pre_ptr, dpre_ptr, act_ptr, dz, weight, row, inside, start, INNER,
    ROWS: tl.constexpr, COLS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Stores dpre and act at COLS columns from `start` of rows `row`, given dz~ there; returns <dz~, z> over them.

    PIECE columns at a time: more of them, in fp32, do not fit in the registers beside dz~.
    """
    if COLS > PIECE:
        first, second = halves(dz, ROWS, COLS)
        half: tl.constexpr = COLS // 2
        part = through_gate(
            pre_ptr, dpre_ptr, act_ptr, first, weight, row, inside, start, INNER, ROWS, half, PIECE
        )  # fmt: skip
        part += through_gate(
            pre_ptr, dpre_ptr, act_ptr, second, weight, row, inside, start + half, INNER, ROWS, half, PIECE
        )  # fmt: skip
    else:
        col = start + tl.arange(0, COLS)
        stored = inside[:, None] & (col < INNER)[None, :]
        at = row_offset(row, 2 * INNER)[:, None] + col[None, :]
        gate = tl.load(pre_ptr + at, mask=stored, other=0.0).to(tl.float32)
        up = tl.load(pre_ptr + at + INNER, mask=stored, other=0.0).to(tl.float32)
        sigma = tl.sigmoid(gate)
        silu = gate * sigma
        z = silu * up
        act_at = act_ptr + row_offset(row, INNER)[:, None] + col[None, :]
        tl.store(act_at, (z * weight[:, None]).to(act_ptr.dtype.element_ty), mask=stored)
        part = tl.sum(dz * z, 1)
        dz = dz * weight[:, None]
        dgate = dz * up * sigma * (1.0 + gate * (1.0 - sigma))
        tl.store(dpre_ptr + at, dgate.to(dpre_ptr.dtype.element_ty), mask=stored)
        tl.store(dpre_ptr + at + INNER, (dz * silu).to(dpre_ptr.dtype.element_ty), mask=stored)
    return part


@triton.jit
def gate_tile(
    dy_ptr, down_ptr, pre_ptr, weight_ptr, dpre_ptr, act_ptr, part_ptr, order_ptr, map_ptr, dy_row, bank_expert,
    bank_row, R, D, INNER, tile, block,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr, PRECISION: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """A block of columns of dz~ for a tile of some expert, and everything that follows from it."""
    expert = tl.load(map_ptr + tile * 4)
    begin = tl.load(map_ptr + tile * 4 + 1)
    end = tl.load(map_ptr + tile * 4 + 2)
    place = begin + tl.arange(0, ROWS)
    row = tl.maximum(tl.minimum(place, end - 1), 0)
    slot = tl.load(order_ptr + row)
    col = block * COLS + tl.arange(0, COLS)
    depth = tl.arange(0, DEPTH)
    a_at = dy_ptr + row_offset(slot // TOP_K, dy_row)[:, None] + depth[None, :]
    b_at = down_ptr + row_offset(expert, bank_expert) + row_offset(depth, bank_row)[:, None] + col[None, :]
    dz = contract(
        a_at, b_at, DEPTH, row_offset(DEPTH, bank_row), col < INNER, D, ROWS, COLS, DEPTH, EVEN_K, EVEN_N, PRECISION
    )
    inside = place < end
    weight = tl.load(weight_ptr + slot).to(tl.float32)
    part = through_gate(
        pre_ptr, dpre_ptr, act_ptr, dz, weight, row, inside, block * COLS, INNER, ROWS, COLS, PIECE
    )  # fmt: skip
    tl.store(part_ptr + row_offset(block, R) + row, part, mask=inside)


@triton.jit
def gate_gradients(
    dy_ptr, down_ptr, pre_ptr, weight_ptr, dpre_ptr, act_ptr, part_ptr, order_ptr, map_ptr, start_ptr, dy_row,
    bank_expert, bank_row, E, R, D, INNER, max_tiles,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr, PERSISTENT: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """dz~ and, from it, dpre [R, 2I], act = w z [R, I] again, and part[block, row] of dw."""
    blocks = tl.cdiv(INNER, COLS)
    if PERSISTENT:
        tiles = tl.load(start_ptr + E)
        for item in tl.range(tl.program_id(0), tiles * blocks, tl.num_programs(0), flatten=True):
            tile, block = place_of(item, tiles, blocks, GROUP)
            gate_tile(
                dy_ptr, down_ptr, pre_ptr, weight_ptr, dpre_ptr, act_ptr, part_ptr, order_ptr, map_ptr, dy_row,
                bank_expert, bank_row, R, D, INNER, tile, block, TOP_K, ROWS, COLS, DEPTH, EVEN_K, EVEN_N, PRECISION,
                PIECE,
            )  # fmt: skip
    else:
        tile, block = place_of(tl.program_id(0), max_tiles, blocks, GROUP)
        if is_idle(map_ptr, tile, E):
            return
        gate_tile(
            dy_ptr, down_ptr, pre_ptr, weight_ptr, dpre_ptr, act_ptr, part_ptr, order_ptr, map_ptr, dy_row,
            bank_expert, bank_row, R, D, INNER, tile, block, TOP_K, ROWS, COLS, DEPTH, EVEN_K, EVEN_N, PRECISION, PIECE,
        )  # fmt: skip


@triton.jit
def sum_parts(part_ptr, dweight_ptr, order_ptr, offsets_ptr, E, R, blocks, ROWS: tl.constexpr):
    """The routing weights' gradients by slot: each row's parts in the order of blocks, zero for sentinels."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < tl.load(offsets_ptr + E)
    total = tl.zeros([ROWS], tl.float32)
    for block in range(blocks):
        total += tl.load(part_ptr + row_offset(block, R) + row, mask=live, other=0.0)
    slot = tl.load(order_ptr + row, mask=row < R, other=0)
    tl.store(dweight_ptr + slot, total.to(dweight_ptr.dtype.element_ty), mask=row < R)


@triton.jit
def bank_gradients(
    a_ptr, g_ptr, out_ptr, order_ptr, offsets_ptr, a_row, a_col, g_row, g_col, out_expert, out_row, out_col, K, N,
    A_SOURCE: tl.constexpr, G_SOURCE: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    DEPTH: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out[e] [K, N] = Σ over e's rows of aᵀ g, ROWS of K and COLS of N a program, DEPTH sorted rows at a time."""
    blocks = tl.cdiv(N, COLS)
    area = blocks * tl.cdiv(K, ROWS)
    expert = tl.program_id(0) // area
    within = tl.program_id(0) % area
    k = within // blocks * ROWS + tl.arange(0, ROWS)
    n = within % blocks * COLS + tl.arange(0, COLS)
    a_at = a_ptr + row_offset(k, a_col)[:, None]
    g_at = g_ptr + row_offset(n, g_col)[None, :]
    begin = tl.load(offsets_ptr + expert).to(tl.int32)
    end = tl.load(offsets_ptr + expert + 1).to(tl.int32)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(begin, end, DEPTH):
        row = start + tl.arange(0, DEPTH)
        inside = row < end
        a_from = row_offset(source_of(order_ptr, row, inside, A_SOURCE, TOP_K), a_row)
        g_from = row_offset(source_of(order_ptr, row, inside, G_SOURCE, TOP_K), g_row)
        a_mask = inside[None, :] if EVEN_K else inside[None, :] & (k < K)[:, None]
        g_mask = inside[:, None] if EVEN_N else inside[:, None] & (n < N)[None, :]
        # loaded transposed: `tl.trans` of a tile would keep mma.sync's from being copied asynchronously
        a = tl.load(a_at + a_from[None, :], mask=a_mask, other=0.0)
        g = tl.load(g_at + g_from[:, None], mask=g_mask, other=0.0)
        total = tl.dot(a, g, total, input_precision=PRECISION)
    at = out_ptr + row_offset(expert, out_expert) + row_offset(k, out_row)[:, None] + row_offset(n, out_col)[None, :]
    mask = (k < K)[:, None] & (n < N)[None, :]
    if ACCUMULATE:
        total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=mask)
