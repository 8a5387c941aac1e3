"""Kernels of the latent expert pass, forward.

T tokens, k experts a token, R = T·k rows sorted by expert, E experts, D model width, RANK r, F ffn width, F_PAD the
same rounded up to 16. A tile is up to TILE rows of one expert: map[tile] = (expert, first row, end row, tiles of the
expert); a tile of expert E holds sentinels. Banks are read with r or d contiguous, so an odd F costs no alignment, and
masks along F end at F_PAD for the same reason.
"""

import triton
import triton.language as tl

from dormouse_kernels.dependents import after_previous
from dormouse_kernels.moe.latent.turns import NOTHING, residual_of, row_turns, store_in_turn, take_ticket
from dormouse_kernels.offsets import row_offset


@triton.jit
def read_tile(map_ptr, tile):
    """(expert, first row, end row, tiles of the expert)."""
    at = map_ptr + tile * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def latent_rows(
    x_ptr, gate_up_ptr, scale_ptr, weight_ptr, index_ptr, order_ptr, inverse_ptr, offsets_ptr, tile_start_ptr, map_ptr,
    pq_ptr, z_ptr, turn_ptr, flag_ptr, ticket_ptr, x_stride, E, D, flag_stride, chunks,
    K: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr, CHUNKS: tl.constexpr,
    TURNS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile's p = U x, q = U' x, z = w · silu(p s) · (q s'); its rows' turns, its lowered flags, the ticket."""
    after_previous(PDL)
    tile = tl.program_id(0)
    expert, begin, end, _ = read_tile(map_ptr, tile)
    chunk = tl.arange(0, CHUNKS)
    tl.store(flag_ptr + row_offset(chunk, flag_stride) + tile, 0, mask=chunk < chunks)
    if tile == 0:
        tl.store(ticket_ptr, 0)
    if (begin >= end) | (expert < 0):
        return
    row = begin + tl.arange(0, TILE)
    inside = row < end
    slot = tl.load(order_ptr + row, mask=inside, other=0).to(tl.int32)
    if TURNS:
        turn = row_turns(slot, row, inside, inverse_ptr, index_ptr, offsets_ptr, tile_start_ptr, expert, E, K, TILE)
        tl.store(turn_ptr + row, turn, mask=inside)
    if expert >= E:
        return
    compute: tl.constexpr = z_ptr.dtype.element_ty
    latent = tl.arange(0, RANK)
    x_row = x_ptr + row_offset(slot // K, x_stride)[:, None]
    u_row = gate_up_ptr + row_offset(expert, 2 * RANK * D) + latent[None, :] * D
    p = tl.zeros([TILE, RANK], tl.float32)
    q = tl.zeros([TILE, RANK], tl.float32)
    for start in range(0, D, BLOCK_D):
        col = start + tl.arange(0, BLOCK_D)
        x = tl.load(x_row + col[None, :], mask=inside[:, None] & (col < D)[None, :], other=0.0).to(compute)
        u = tl.load(u_row + col[:, None], mask=(col < D)[:, None], other=0.0).to(compute)
        u_gate = tl.load(u_row + RANK * D + col[:, None], mask=(col < D)[:, None], other=0.0).to(compute)
        p = tl.dot(x, u, p, input_precision=PRECISION)
        q = tl.dot(x, u_gate, q, input_precision=PRECISION)
    s_at = scale_ptr + row_offset(expert, 2 * RANK) + latent
    g = p * tl.load(s_at).to(tl.float32)[None, :]
    w = tl.load(weight_ptr + slot, mask=inside, other=0.0).to(tl.float32)
    z = g * tl.sigmoid(g) * (q * tl.load(s_at + RANK).to(tl.float32)[None, :]) * w[:, None]
    at = row_offset(row, 2 * RANK)[:, None] + latent[None, :]
    tl.store(pq_ptr + at, p.to(compute), mask=inside[:, None])
    tl.store(pq_ptr + at + RANK, q.to(compute), mask=inside[:, None])
    tl.store(z_ptr + row_offset(row, RANK)[:, None] + latent[None, :], z.to(compute), mask=inside[:, None])


@triton.jit
def expand_rows(
    z_ptr, v_ptr, out_ptr, residual_ptr, order_ptr, turn_ptr, map_ptr, tile_start_ptr, flag_ptr, ticket_ptr,
    E, F, flag_stride, max_tiles,
    K: tl.constexpr, F_PAD: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, BLOCK_F: tl.constexpr,
    SPLIT_F: tl.constexpr, TURNS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """V z of a tile's rows, SPLIT_F columns: summed by token in out [T, F_PAD] with TURNS, else by slot.

    Ordered by split, then tile, so that what takes turns meets in L2.
    """
    after_previous(PDL)
    place = tl.program_id(0)
    if TURNS:
        place = take_ticket(ticket_ptr)
    tile = place % max_tiles
    first = place // max_tiles * SPLIT_F
    expert, begin, end, _ = read_tile(map_ptr, tile)
    if (expert < 0) | (begin >= end):
        return
    latent = tl.arange(0, RANK)
    row = begin + tl.arange(0, TILE)
    inside = row < end
    real = expert < E
    z = tl.load(z_ptr + row_offset(row, RANK)[:, None] + latent[None, :], mask=(inside & real)[:, None], other=0.0)
    slot = tl.load(order_ptr + row, mask=inside, other=0).to(tl.int32)
    v_row = v_ptr + row_offset(expert, F * RANK)
    if TURNS:
        turn = tl.load(turn_ptr + row, mask=inside, other=NOTHING)
        out_row = row_offset(slot // K, F_PAD)[:, None]
    else:
        out_row = row_offset(slot, F_PAD)[:, None]
    for start in range(first, min(first + SPLIT_F, F_PAD), BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        v = tl.load(v_row + f[None, :] * RANK + latent[:, None], mask=((f < F) & real)[None, :], other=0.0)
        # rounded as the other writer's row is, so that which of the two comes first changes no bit
        h = tl.dot(z, v.to(z.dtype), input_precision=PRECISION).to(out_ptr.dtype.element_ty)
        columns = f < F_PAD
        at = out_row + f[None, :]
        if TURNS:
            flags = flag_ptr + row_offset(start // BLOCK_F, flag_stride)
            store_in_turn(
                out_ptr, residual_ptr, at, h, turn, columns, f < F, flags, tile, tile_start_ptr + E + 1,
                HAS_RESIDUAL, INTERPRETED,
            )  # fmt: skip
        else:
            tl.store(out_ptr + at, h, mask=inside[:, None] & columns[None, :])


@triton.jit
def sum_slots(
    rows_ptr, residual_ptr, out_ptr, T, F,
    K: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[t] = Σ_j rows[t k + j] in order of j, in fp32, then the first F columns of residual[t]."""
    after_previous(PDL)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (token < T)[:, None] & (col < WIDTH)[None, :]
    total = tl.zeros([BLOCK_T, BLOCK], tl.float32)
    for j in tl.static_range(K):
        at = row_offset(token, K * WIDTH)[:, None] + j * WIDTH + col[None, :]
        total += tl.load(rows_ptr + at, mask=mask, other=0.0).to(tl.float32)
    at = row_offset(token, WIDTH)[:, None] + col[None, :]
    if HAS_RESIDUAL:
        total += residual_of(residual_ptr, at, mask, col < F)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)
