"""Kernels of the latent expert pass, backward. Letters, tiles and sentinels as in forward.py.

From dh = dL/dout and the saved p, q and z~ = w z, row by row:
  dz~ = dh V     dw = <dz~, z>     dz = w dz~     dV = Σ_rows dh^T z~
  g = p s     u = q s'     σ = sigmoid(g)     dg = dz u σ (1 + g (1 - σ))     du = dz g σ
  ds = Σ dg p     ds' = Σ du q     dp = dg s     dq = du s'     dU = Σ dp^T x     dU' = Σ dq^T x     dx = dp U + dq U'
An expert of one tile gets its weight gradients from the programs of that tile; `long_*` serve the experts of several,
whose rows they sum in order. Every element of a weight gradient is written by one program, zeros of idle experts too.
"""

import triton
import triton.language as tl

from dormouse_kernels.dependents import after_previous
from dormouse_kernels.moe.latent.forward import read_tile
from dormouse_kernels.offsets import row_offset


@triton.jit
def store_gradient(at, value, mask, ACCUMULATE: tl.constexpr):
    """Writes a weight gradient once, or adds to it in fp32."""
    if ACCUMULATE:
        value += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, value.to(at.dtype.element_ty), mask=mask)


@triton.jit
def grad_v_rows(
    dh_ptr, z_ptr, v_ptr, dv_ptr, pq_ptr, scale_ptr, weight_ptr, dpq_ptr, dweight_ptr, dscale_part_ptr, order_ptr,
    map_ptr, E, F,
    K: tl.constexpr, F_PAD: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, BLOCK_F: tl.constexpr,
    PIECES: tl.constexpr, DATA: tl.constexpr, WEIGHTS: tl.constexpr, ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One pass over a tile's dh: dp, dq, dw and the tile's part of ds; dV of a one-tile expert.

    PIECES (1 or 2) blocks of columns a step: with 2, adjacent 128-byte pieces of a row are asked for at once.
    """
    after_previous(PDL)
    tile = tl.program_id(0)
    expert, begin, end, count = read_tile(map_ptr, tile)
    if expert < 0:
        return
    latent = tl.arange(0, RANK)
    row = begin + tl.arange(0, TILE)
    inside = row < end
    slot = tl.load(order_ptr + row, mask=inside, other=0).to(tl.int32)
    if expert >= E:
        if DATA:
            tl.store(dweight_ptr + slot, tl.zeros([TILE], dweight_ptr.dtype.element_ty), mask=inside)
        return
    v_at = row_offset(expert, F * RANK)
    if begin >= end:
        if WEIGHTS and not ACCUMULATE:
            for start in range(0, F, BLOCK_F):
                f = start + tl.arange(0, BLOCK_F)
                at = dv_ptr + v_at + f[:, None] * RANK + latent[None, :]
                tl.store(at, tl.zeros([BLOCK_F, RANK], dv_ptr.dtype.element_ty), mask=(f < F)[:, None])
        return
    dh_row = dh_ptr + row_offset(slot // K, F_PAD)[:, None]
    z = tl.load(z_ptr + row_offset(row, RANK)[:, None] + latent[None, :], mask=inside[:, None], other=0.0)
    dz = tl.zeros([TILE, RANK], tl.float32)
    # an accumulator of its own: two products into one a step have been miscompiled elsewhere
    dz_next = tl.zeros([TILE, RANK], tl.float32)
    for start in range(0, F, PIECES * BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        dz = grad_v_piece(
            dh_row, z, v_ptr + v_at, dv_ptr + v_at, dz, f, inside, count == 1, F, F_PAD, RANK, DATA, WEIGHTS,
            ACCUMULATE, PRECISION,
        )  # fmt: skip
        if PIECES == 2:
            dz_next = grad_v_piece(
                dh_row, z, v_ptr + v_at, dv_ptr + v_at, dz_next, f + BLOCK_F, inside, count == 1, F, F_PAD, RANK, DATA,
                WEIGHTS, ACCUMULATE, PRECISION,
            )  # fmt: skip
    if DATA:
        latent_gradients(
            dz + dz_next, pq_ptr, scale_ptr + row_offset(expert, 2 * RANK), weight_ptr, dpq_ptr, dweight_ptr,
            dscale_part_ptr + row_offset(tile, 2 * RANK), row, slot, inside, RANK,
        )  # fmt: skip


@triton.jit
def grad_v_piece(
    dh_row, z, v_ptr, dv_ptr, dz, f, inside, alone, F,
    F_PAD: tl.constexpr, RANK: tl.constexpr, DATA: tl.constexpr, WEIGHTS: tl.constexpr, ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Columns f of a tile: dz~ + dh V, returned; dV = dh^T z~, stored for an expert that has this tile alone."""
    dh = tl.load(dh_row + f[None, :], mask=inside[:, None] & (f < F_PAD)[None, :], other=0.0)
    at = f[:, None] * RANK + tl.arange(0, RANK)[None, :]
    real = (f < F)[:, None]
    if DATA:
        v = tl.load(v_ptr + at, mask=real, other=0.0)
        dz = tl.dot(dh, v.to(dh.dtype), dz, input_precision=PRECISION)
    if WEIGHTS:
        dv = tl.dot(tl.trans(dh), z, input_precision=PRECISION)
        store_gradient(dv_ptr + at, dv, real & alone, ACCUMULATE)
    return dz


@triton.jit
def latent_gradients(
    dz, pq_ptr, s_ptr, weight_ptr, dpq_ptr, dweight_ptr, part_ptr, row, slot, inside, RANK: tl.constexpr
):
    """From a tile's dz~ [TILE, r]: dp, dq, the routing weights' gradients, a part of the scales' gradients."""
    latent = tl.arange(0, RANK)
    at = row_offset(row, 2 * RANK)[:, None] + latent[None, :]
    p = tl.load(pq_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
    q = tl.load(pq_ptr + at + RANK, mask=inside[:, None], other=0.0).to(tl.float32)
    s = tl.load(s_ptr + latent).to(tl.float32)[None, :]
    s_gate = tl.load(s_ptr + RANK + latent).to(tl.float32)[None, :]
    w = tl.load(weight_ptr + slot, mask=inside, other=0.0).to(tl.float32)
    g = p * s
    u = q * s_gate
    sigma = tl.sigmoid(g)
    tl.store(dweight_ptr + slot, tl.sum(dz * g * sigma * u, 1).to(dweight_ptr.dtype.element_ty), mask=inside)
    dz = dz * w[:, None]
    dg = dz * u * sigma * (1.0 + g * (1.0 - sigma))
    du = dz * g * sigma
    tl.store(part_ptr + latent, tl.sum(dg * p, 0))
    tl.store(part_ptr + RANK + latent, tl.sum(du * q, 0))
    tl.store(dpq_ptr + at, (dg * s).to(dpq_ptr.dtype.element_ty), mask=inside[:, None])
    tl.store(dpq_ptr + at + RANK, (du * s_gate).to(dpq_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def grad_scale(part_ptr, dscale_ptr, expert, tile, begin, end, count, RANK: tl.constexpr, ACCUMULATE: tl.constexpr):
    """An expert's gradient of s and s': its tiles' parts in order, zeros where it has no rows."""
    latent = tl.arange(0, 2 * RANK)
    total = tl.zeros([2 * RANK], tl.float32)
    if begin < end:
        at = part_ptr + row_offset(tile, 2 * RANK) + latent
        for _ in range(count):
            total += tl.load(at)
            at += 2 * RANK
    store_gradient(dscale_ptr + row_offset(expert, 2 * RANK) + latent, total, latent >= 0, ACCUMULATE)


@triton.jit
def grad_u_rows(
    x_ptr, dpq_ptr, gate_up_ptr, du_ptr, dx_ptr, order_ptr, map_ptr, tile_start_ptr, dscale_part_ptr, dscale_ptr,
    x_stride, E, D,
    K: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
    DATA: tl.constexpr, WEIGHTS: tl.constexpr, ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile's dx by slot [R, D] and dU, dU' of a one-tile expert: x and U stream, dp and dq are read once."""
    after_previous(PDL)
    tile = tl.program_id(0) // SPLITS
    expert, begin, end, count = read_tile(map_ptr, tile)
    if expert < 0:
        return
    width = tl.cdiv(tl.cdiv(D, SPLITS), BLOCK_D) * BLOCK_D
    first = tl.program_id(0) % SPLITS * width
    last = min(first + width, D)
    real = expert < E
    latent = tl.arange(0, 2 * RANK)
    u_row = row_offset(expert, 2 * RANK * D) + latent[:, None] * D
    if WEIGHTS:
        leads = (first == 0) & real & (tile == tl.load(tile_start_ptr + expert))
        if leads:
            grad_scale(dscale_part_ptr, dscale_ptr, expert, tile, begin, end, count, RANK, ACCUMULATE)
    if begin >= end:
        if WEIGHTS and not ACCUMULATE:
            for start in range(first, last, BLOCK_D):
                col = start + tl.arange(0, BLOCK_D)
                zeros = tl.zeros([2 * RANK, BLOCK_D], du_ptr.dtype.element_ty)
                tl.store(du_ptr + u_row + col[None, :], zeros, mask=(col < D)[None, :] & real)
        return
    row = begin + tl.arange(0, TILE)
    inside = row < end
    slot = tl.load(order_ptr + row, mask=inside, other=0).to(tl.int32)
    dpq_at = dpq_ptr + row_offset(row, 2 * RANK)[:, None] + latent[None, :]
    dpq = tl.load(dpq_at, mask=(inside & real)[:, None], other=0.0)
    x_row = x_ptr + row_offset(slot // K, x_stride)[:, None]
    dx_row = dx_ptr + row_offset(slot, D)[:, None]
    alone = real & (count == 1)
    for start in range(first, last, BLOCK_D):
        col = start + tl.arange(0, BLOCK_D)
        columns = (col < D)[None, :]
        if WEIGHTS:
            x = tl.load(x_row + col[None, :], mask=(inside & alone)[:, None] & columns, other=0.0)
            du = tl.dot(tl.trans(dpq), x.to(dpq.dtype), input_precision=PRECISION)
            store_gradient(du_ptr + u_row + col[None, :], du, columns & alone, ACCUMULATE)
        if DATA:
            u = tl.load(gate_up_ptr + u_row + col[None, :], mask=columns & real, other=0.0)
            dx = tl.dot(dpq, u.to(dpq.dtype), input_precision=PRECISION)
            tl.store(dx_row + col[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside[:, None] & columns)


@triton.jit
def long_grad_v(
    dh_ptr, z_ptr, dv_ptr, order_ptr, offsets_ptr, long_ptr, F,
    K: tl.constexpr, F_PAD: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, BLOCK_F: tl.constexpr,
    ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The gradient dV of the experts with several tiles."""
    after_previous(PDL)
    chunks: tl.constexpr = (F_PAD + BLOCK_F - 1) // BLOCK_F
    latent = tl.arange(0, RANK)
    for item in range(tl.program_id(0), tl.load(long_ptr) * chunks, tl.num_programs(0)):
        expert = tl.load(long_ptr + 1 + item // chunks)
        f = (item % chunks) * BLOCK_F + tl.arange(0, BLOCK_F)
        end = tl.load(offsets_ptr + expert + 1).to(tl.int32)
        total = tl.zeros([BLOCK_F, RANK], tl.float32)
        for start in range(tl.load(offsets_ptr + expert).to(tl.int32), end, ROWS):
            row = start + tl.arange(0, ROWS)
            inside = row < end
            slot = tl.load(order_ptr + row, mask=inside, other=0).to(tl.int32)
            dh_at = dh_ptr + row_offset(slot // K, F_PAD)[:, None] + f[None, :]
            dh = tl.load(dh_at, mask=inside[:, None] & (f < F_PAD)[None, :], other=0.0)
            z = tl.load(z_ptr + row_offset(row, RANK)[:, None] + latent[None, :], mask=inside[:, None], other=0.0)
            total = tl.dot(tl.trans(dh), z, total, input_precision=PRECISION)
        at = dv_ptr + row_offset(expert, F * RANK) + f[:, None] * RANK + latent[None, :]
        store_gradient(at, total, (f < F)[:, None], ACCUMULATE)


@triton.jit
def long_grad_u(
    x_ptr, dpq_ptr, du_ptr, order_ptr, offsets_ptr, long_ptr, x_stride, D,
    K: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The gradients dU and dU' of the experts with several tiles."""
    after_previous(PDL)
    chunks = tl.cdiv(D, BLOCK_D)
    latent = tl.arange(0, 2 * RANK)
    for item in range(tl.program_id(0), tl.load(long_ptr) * chunks, tl.num_programs(0)):
        expert = tl.load(long_ptr + 1 + item // chunks)
        col = (item % chunks) * BLOCK_D + tl.arange(0, BLOCK_D)
        end = tl.load(offsets_ptr + expert + 1).to(tl.int32)
        total = tl.zeros([2 * RANK, BLOCK_D], tl.float32)
        for start in range(tl.load(offsets_ptr + expert).to(tl.int32), end, ROWS):
            row = start + tl.arange(0, ROWS)
            inside = row < end
            slot = tl.load(order_ptr + row, mask=inside, other=0).to(tl.int32)
            x_at = x_ptr + row_offset(slot // K, x_stride)[:, None] + col[None, :]
            x = tl.load(x_at, mask=inside[:, None] & (col < D)[None, :], other=0.0)
            dpq_at = dpq_ptr + row_offset(row, 2 * RANK)[:, None] + latent[None, :]
            dpq = tl.load(dpq_at, mask=inside[:, None], other=0.0)
            total = tl.dot(tl.trans(dpq), x.to(dpq.dtype), total, input_precision=PRECISION)
        at = du_ptr + row_offset(expert, 2 * RANK * D) + latent[:, None] * D + col[None, :]
        store_gradient(at, total, (col < D)[None, :], ACCUMULATE)
