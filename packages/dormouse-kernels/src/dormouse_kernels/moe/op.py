"""The expert passes as functions of tensors: their promises, and the checks of what they are given."""

from __future__ import annotations

import torch

from dormouse_kernels.moe import checks
from dormouse_kernels.moe.grouped import tiles as grouped_tiles
from dormouse_kernels.moe.latent import tiles as latent_tiles
from dormouse_kernels.moe.passes import Operands
from dormouse_kernels.moe.routing import Routing
from dormouse_kernels.moe.run import run
from dormouse_kernels.moe.selection import AUTO


def latent_glu_experts(
    hidden_states: torch.Tensor,
    gate_up_proj: torch.Tensor,
    scale: torch.Tensor,
    v: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    routing: Routing | None = None,
    residual: torch.Tensor | None = None,
    capacity: int | None = None,
    check_indices: bool = False,
    implementation: str = AUTO,
    tiles: latent_tiles.Tiles | None = None,
) -> torch.Tensor:
    """`residual + Σ_j w_j · V_e (silu(p·s_e) · (q·s'_e))`, p = U_e x, q = U'_e x: over each token's k experts.

    Shapes: hidden_states [T, d]; gate_up_proj [E, 2r, d], rows of U then rows of U'; scale [E, 2r], s then s';
    v [E, f, r]; top_k_index [T, k] int; top_k_weights [T, k]; residual and the result [T, f_pad], f_pad = f rounded
    up to 16, columns from f on exactly zero. The banks must be contiguous along their last dimension.

    Dtypes: the operands hidden_states, gate_up_proj and v are promoted to their widest, which is also the result's;
    under autocast they are cast to its dtype first. Everything but the matrix products is fp32 (fp64 for fp64
    operands); "reference" rounds the result once, the others each expert's row and then the sum. Each gradient comes
    back in its argument's dtype.

    `routing`: `route(top_k_index, E)` made earlier. `capacity`: an expert takes its first rows in slot order, further
    ones are dropped and counted. An index outside [0, E) gives zeros and is counted; `check_indices=True` refuses it
    instead, reading the device. Saved for the backward: the arguments and [p, q] ("triton": z too); the GLU is
    recomputed. "triton" needs contiguous banks, a rank of 16, 32, 64 or 128 and no capacity; "auto" falls back.
    `tiles`: `dormouse_kernels.tiles.LatentTiles` for "triton", in place of the table's row for the card.
    Errors: `ValueError` or `TypeError`, naming the argument. Formula: two-latent spectral experts, design of this
    project; the factorisation is that of arXiv 2604.00733.
    """
    op = "latent_glu_experts"
    checks.check_hidden(op, hidden_states)
    checks.check_bank(op, "gate_up_proj", gate_up_proj, "[E, 2r, d]")
    checks.check_bank(op, "v", v, "[E, f, r]")
    num_experts, rows, d = gate_up_proj.shape
    f, r = v.shape[1:]
    width = -(-f // 16) * 16
    tokens = hidden_states.shape[0]
    checks.check_shape(op, "hidden_states", hidden_states, (tokens, d), "[T, d]")
    checks.check_shape(op, "gate_up_proj", gate_up_proj, (num_experts, 2 * r, d), "[E, 2r, d]")
    checks.check_shape(op, "v", v, (num_experts, f, r), "[E, f, r]")
    checks.check_shape(op, "scale", scale, (num_experts, rows), "[E, 2r]")
    if residual is not None:
        checks.check_shape(op, "residual", residual, (tokens, width), "[T, f_pad]")
    operands = Operands(hidden_states, gate_up_proj, scale, v, top_k_weights, residual)
    checks.check_floats(op, operands.named("v"))
    if tiles is not None:
        checks.check_tiles(op, tiles, latent_tiles.Tiles)
    return run(op, operands, width, top_k_index, routing, capacity, check_indices, implementation, tiles)


def glu_experts(
    hidden_states: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    routing: Routing | None = None,
    capacity: int | None = None,
    check_indices: bool = False,
    implementation: str = AUTO,
    tiles: grouped_tiles.Tiles | None = None,
) -> torch.Tensor:
    """`Σ_j w_j · W_down,e (silu(W_gate,e x) · (W_up,e x))` over each token's k experts: SwiGLU experts.

    Shapes, in Hugging Face's layout: hidden_states [T, D]; gate_up_proj [E, 2I, D], gate rows then up rows;
    down_proj [E, D, I]; top_k_index [T, k] int; top_k_weights [T, k]; the result is [T, D]. No padding.
    Dtypes, `routing`, `capacity`, `check_indices`, what is saved, and errors: as `latent_glu_experts`; but "triton"
    takes any shape and strides, and `tiles` are `dormouse_kernels.tiles.GroupedTiles`.
    """
    op = "glu_experts"
    checks.check_hidden(op, hidden_states)
    checks.check_bank(op, "gate_up_proj", gate_up_proj, "[E, 2I, D]")
    checks.check_bank(op, "down_proj", down_proj, "[E, D, I]")
    num_experts, _, width = gate_up_proj.shape
    inner = down_proj.shape[2]
    checks.check_shape(op, "hidden_states", hidden_states, (hidden_states.shape[0], width), "[T, D]")
    checks.check_shape(op, "gate_up_proj", gate_up_proj, (num_experts, 2 * inner, width), "[E, 2I, D]")
    checks.check_shape(op, "down_proj", down_proj, (num_experts, width, inner), "[E, D, I]")
    operands = Operands(hidden_states, gate_up_proj, None, down_proj, top_k_weights, None)
    checks.check_floats(op, operands.named("down_proj"))
    if tiles is not None:
        checks.check_tiles(op, tiles, grouped_tiles.Tiles)
    return run(op, operands, width, top_k_index, routing, capacity, check_indices, implementation, tiles)
