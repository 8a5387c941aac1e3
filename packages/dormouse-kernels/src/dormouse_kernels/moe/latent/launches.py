"""Allocation, grids and tiles of the latent expert pass. Nothing here reads the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dormouse_kernels.launch import interpreting, launch
from dormouse_kernels.moe.latent import backward, forward
from dormouse_kernels.moe.latent.plan import Plan


@dataclass(frozen=True, eq=False)
class Latents:
    """What the forward keeps of a pass: 13 MB at b1."""

    z: torch.Tensor
    """[R, r]: silu(p s) · (q s'), times the routing weight."""
    pq: torch.Tensor
    """[R, 2r]: p, then q."""


@dataclass(frozen=True, eq=False)
class Stash:
    """What the data gradients leave for the weight gradients."""

    dpq: torch.Tensor
    """[R, 2r]: gradients of p, then q."""
    dscale_parts: torch.Tensor
    """[max_tiles, 2r] fp32: each tile's part of the scales' gradients."""


def run_forward(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    scale: torch.Tensor,
    v: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor | None,
    plan: Plan,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, Latents]:
    """The output [T, f_pad] and what to save. Two launches where tokens take turns, otherwise three."""
    slots, k, tiles = plan.slots, plan.top_k, plan.tiles
    experts, f, rank = v.shape
    f_pad = -(-f // 16) * 16
    turns = tiles.turns and k <= 2
    block_f = tiles.expand_f if residual is None else tiles.expand_residual_f
    blocks = -(-f_pad // block_f)
    z = torch.empty(slots, rank, dtype=dtype, device=x.device)
    pq = torch.empty(slots, 2 * rank, dtype=dtype, device=x.device)
    turn = torch.empty(slots, dtype=torch.int32, device=x.device)
    flags = torch.empty(blocks * plan.cut.max_tiles + 1, dtype=torch.int32, device=x.device)
    shared = {
        "order_ptr": plan.routing.order, "map_ptr": plan.cut.tiles, "tile_start_ptr": plan.cut.start, "turn_ptr": turn,
        "flag_ptr": flags, "ticket_ptr": flags[-1:], "flag_stride": plan.cut.max_tiles, "z_ptr": z, "E": experts,
        "K": k, "RANK": rank, "TILE": tiles.rows, "TURNS": turns, "PRECISION": _precision(dtype), "PDL": tiles.pdl,
    }  # fmt: skip
    launch(
        forward.latent_rows,
        (plan.cut.max_tiles,),
        {
            "x_ptr": x, "gate_up_ptr": gate_up, "scale_ptr": scale, "weight_ptr": weights, "index_ptr": plan.index,
            "inverse_ptr": plan.routing.inverse, "offsets_ptr": plan.routing.offsets, "pq_ptr": pq,
            "x_stride": x.stride(0), "D": x.shape[1], "chunks": blocks, "BLOCK_D": tiles.latent_d,
            "CHUNKS": 1 << (blocks - 1).bit_length(), **shared,
        },
        num_warps=tiles.latent_warps,
        num_stages=tiles.latent_stages,
        pdl=tiles.pdl,
    )  # fmt: skip
    out = torch.empty(x.shape[0], f_pad, dtype=dtype, device=x.device)
    rows = out if turns else torch.empty(slots, f_pad, dtype=dtype, device=x.device)
    per_split = -(-blocks // tiles.expand_splits)
    launch(
        forward.expand_rows,
        (plan.cut.max_tiles * -(-blocks // per_split),),
        {
            "v_ptr": v, "out_ptr": rows, "residual_ptr": out if residual is None else residual, "F": f,
            "max_tiles": plan.cut.max_tiles, "F_PAD": f_pad, "BLOCK_F": block_f,
            "SPLIT_F": per_split * block_f, "HAS_RESIDUAL": residual is not None,
            "INTERPRETED": interpreting(), **shared,
        },
        num_warps=tiles.expand_warps,
        num_stages=tiles.expand_stages,
        pdl=tiles.pdl,
    )  # fmt: skip
    if not turns:
        sum_slots(rows, residual, out, k, f, pdl=tiles.pdl)
    return out, Latents(z, pq)


def sum_slots(
    rows: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, k: int, f: int, *, pdl: bool
) -> None:
    """Writes out [T, n] = residual[:, :f] + Σ_j rows [T·k, n], in order of j."""
    tokens, width = out.shape
    block_t, block = (16, 64) if interpreting() else (8, 256)
    grid = (-(-tokens // block_t), -(-width // block))
    if not tokens:
        return
    launch(
        forward.sum_slots,
        grid,
        {
            "rows_ptr": rows, "residual_ptr": out if residual is None else residual, "out_ptr": out, "T": tokens,
            "F": f, "K": k, "WIDTH": width, "BLOCK_T": block_t, "BLOCK": block, "HAS_RESIDUAL": residual is not None,
            "PDL": pdl,
        },
        pdl=pdl,
    )  # fmt: skip


def grad_v(
    dh: torch.Tensor,
    saved: Latents,
    scale: torch.Tensor,
    v: torch.Tensor,
    weights: torch.Tensor,
    plan: Plan,
    *,
    data: bool,
    dv: torch.Tensor | None,
    accumulate: bool = False,
) -> tuple[torch.Tensor, Stash]:
    """One pass over dh: the routing weights' gradients [T, k] and the stash, both of no rows unless `data`.

    Writes or adds to `dv` when given.
    """
    experts, f, rank = v.shape
    tiles, device = plan.tiles, v.device
    rows, parts = (plan.slots, plan.cut.max_tiles) if data else (0, 0)
    dpq = torch.empty(rows, 2 * rank, dtype=saved.pq.dtype, device=device)
    dscale_parts = torch.empty(parts, 2 * rank, dtype=torch.float32, device=device)
    dweights = torch.empty(plan.index.shape if data else (0, 0), dtype=weights.dtype, device=device)
    shared = {
        "dh_ptr": dh, "z_ptr": saved.z, "dv_ptr": v if dv is None else dv, "order_ptr": plan.routing.order, "F": f,
        "K": plan.top_k, "F_PAD": dh.shape[1], "RANK": rank, "ACCUMULATE": accumulate,
        "PRECISION": _precision(saved.z.dtype), "PDL": tiles.pdl,
    }  # fmt: skip
    launch(
        backward.grad_v_rows,
        (plan.cut.max_tiles,),
        {
            "v_ptr": v, "pq_ptr": saved.pq, "scale_ptr": scale, "weight_ptr": weights, "dpq_ptr": dpq,
            "dweight_ptr": dweights, "dscale_part_ptr": dscale_parts, "map_ptr": plan.cut.tiles, "E": experts,
            "TILE": tiles.rows, "BLOCK_F": tiles.grad_v_f, "PIECES": tiles.grad_v_pieces, "DATA": data,
            "WEIGHTS": dv is not None, **shared,
        },
        num_warps=tiles.grad_v_warps,
        num_stages=tiles.grad_v_stages,
        pdl=tiles.pdl,
    )  # fmt: skip
    if dv is not None:
        launch(
            backward.long_grad_v,
            (tiles.long_programs,),
            {
                "offsets_ptr": plan.routing.offsets, "long_ptr": plan.cut.long, "ROWS": tiles.rows,
                "BLOCK_F": tiles.long_block, **shared,
            },
            num_warps=tiles.long_warps,
            num_stages=tiles.long_stages,
            pdl=tiles.pdl,
        )  # fmt: skip
    return dweights, Stash(dpq, dscale_parts)


def grad_u(
    x: torch.Tensor,
    stash: Stash,
    gate_up: torch.Tensor,
    plan: Plan,
    *,
    data: bool,
    du: torch.Tensor | None,
    dscale: torch.Tensor | None,
    accumulate: bool = False,
) -> torch.Tensor | None:
    """Returns dx [T, D] when `data`; writes or adds to `du` and `dscale` when both are given."""
    experts, double_rank, width = gate_up.shape
    tiles = plan.tiles
    weights = du is not None and dscale is not None
    rows = x.new_empty(plan.slots if data else 0, width, dtype=stash.dpq.dtype)
    shared = {
        "x_ptr": x, "dpq_ptr": stash.dpq, "du_ptr": du if weights else gate_up, "order_ptr": plan.routing.order,
        "x_stride": x.stride(0), "D": width, "K": plan.top_k, "RANK": double_rank // 2, "ACCUMULATE": accumulate,
        "PRECISION": _precision(stash.dpq.dtype), "PDL": tiles.pdl,
    }  # fmt: skip
    launch(
        backward.grad_u_rows,
        (plan.cut.max_tiles * tiles.grad_u_splits,),
        {
            "gate_up_ptr": gate_up, "dx_ptr": rows, "map_ptr": plan.cut.tiles, "tile_start_ptr": plan.cut.start,
            "dscale_part_ptr": stash.dscale_parts, "dscale_ptr": dscale if weights else stash.dscale_parts,
            "E": experts, "TILE": tiles.rows, "BLOCK_D": tiles.grad_u_d, "SPLITS": tiles.grad_u_splits, "DATA": data,
            "WEIGHTS": weights, **shared,
        },
        num_warps=tiles.grad_u_warps,
        num_stages=tiles.grad_u_stages,
        pdl=tiles.pdl,
    )  # fmt: skip
    if weights:
        launch(
            backward.long_grad_u,
            (tiles.long_programs,),
            {
                "offsets_ptr": plan.routing.offsets, "long_ptr": plan.cut.long, "ROWS": tiles.rows,
                "BLOCK_D": tiles.long_block, **shared,
            },
            num_warps=tiles.long_warps,
            num_stages=tiles.long_stages,
            pdl=tiles.pdl,
        )  # fmt: skip
    if not data:
        return None
    dx = torch.empty(x.shape[0], width, dtype=x.dtype, device=x.device)
    sum_slots(rows, None, dx, plan.top_k, width, pdl=tiles.pdl)
    return dx


def _precision(dtype: torch.dtype) -> str:
    """What tl.dot does with fp32 operands: exact products, never tf32; the word means nothing to narrower ones."""
    return "ieee" if dtype == torch.float32 else "tf32"
