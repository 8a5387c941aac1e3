"""The expert passes as functions of tensors: checks, choice of implementation, counting, autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from dormouse_kernels import counters
from dormouse_kernels.launch import interpreting
from dormouse_kernels.moe import checks, gated
from dormouse_kernels.moe.grouped.tiles import Tiles, tiles_on
from dormouse_kernels.moe.latent import tiles as latent_tiles
from dormouse_kernels.moe.layout import Layout
from dormouse_kernels.moe.padded import PaddedRows
from dormouse_kernels.moe.reference import SortedRows
from dormouse_kernels.moe.routing import Routing, route
from dormouse_kernels.moe.routing.route import TILE_ROWS
from dormouse_kernels.moe.selection import AUTO, TRITON, TRITON_RANKS, Choice, choose

_LAYOUTS: dict[str, Callable[[Routing, int | None, torch.dtype], Layout]] = {
    "reference": SortedRows,
    "padded": PaddedRows,
}


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
) -> torch.Tensor:
    """`residual + Σ_j w_j · V_e (silu(p·s_e) · (q·s'_e))`, p = U_e x, q = U'_e x: over each token's k experts.

    Shapes: hidden_states [T, d]; gate_up_proj [E, 2r, d], rows of U then rows of U'; scale [E, 2r], s then s';
    v [E, f, r]; top_k_index [T, k] int; top_k_weights [T, k]; residual and the result [T, f_pad], f_pad = f rounded
    up to 16, columns from f on exactly zero. The banks must be contiguous along their last dimension.

    Dtypes: the operands hidden_states, gate_up_proj and v are promoted to their widest, which is also the result's;
    under autocast they are cast to its dtype first. Everything but the matrix products is fp32 (fp64 for fp64
    operands), and the result is rounded once. Each gradient comes back in its argument's dtype.

    `routing`: `route(top_k_index, E)` made earlier. `capacity`: an expert takes its first rows in slot order, further
    ones are dropped and counted. An index outside [0, E) gives zeros and is counted; `check_indices=True` refuses it
    instead, reading the device. Saved for the backward: the arguments and [p, q] ("triton": z too); the GLU is
    recomputed. "triton" needs contiguous banks, a rank of 16, 32 or 64 and no capacity: "auto" falls back, counted.
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
    arguments = _Arguments(
        hidden_states=hidden_states, gate_up_proj=gate_up_proj, scale=scale, down=v, top_k_weights=top_k_weights,
        residual=residual, width=width,
    )  # fmt: skip
    checks.check_floats(op, arguments.floats("v"))
    return _run(op, arguments, top_k_index, routing, capacity, check_indices, implementation)


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
) -> torch.Tensor:
    """`Σ_j w_j · W_down,e (silu(W_gate,e x) · (W_up,e x))` over each token's k experts: SwiGLU experts.

    Shapes, in Hugging Face's layout: hidden_states [T, D]; gate_up_proj [E, 2I, D], gate rows then up rows;
    down_proj [E, D, I]; top_k_index [T, k] int; top_k_weights [T, k]; the result is [T, D]. No padding.
    Dtypes, `routing`, `capacity`, `check_indices`, what is saved, and errors: as `latent_glu_experts`; but "triton"
    takes any shape and strides.
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
    arguments = _Arguments(
        hidden_states=hidden_states, gate_up_proj=gate_up_proj, scale=None, down=down_proj,
        top_k_weights=top_k_weights, residual=None, width=width,
    )  # fmt: skip
    checks.check_floats(op, arguments.floats("down_proj"))
    return _run(op, arguments, top_k_index, routing, capacity, check_indices, implementation)


@dataclass(frozen=True)
class _Arguments:
    """The floats of a pass once their shapes are known to fit; `down` is V or the down projection."""

    hidden_states: torch.Tensor
    gate_up_proj: torch.Tensor
    scale: torch.Tensor | None
    down: torch.Tensor
    top_k_weights: torch.Tensor
    residual: torch.Tensor | None
    width: int

    def floats(self, down: str) -> dict[str, torch.Tensor]:
        """The tensors by the names that the caller knows them by."""
        named = {
            "hidden_states": self.hidden_states,
            "gate_up_proj": self.gate_up_proj,
            "scale": self.scale,
            down: self.down,
            "top_k_weights": self.top_k_weights,
            "residual": self.residual,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(hidden_states, gate_up_proj, down), cast as autocast would cast a linear layer's operands."""
        operands = self.hidden_states, self.gate_up_proj, self.down
        device = self.hidden_states.device.type
        if not torch.is_autocast_enabled(device) or torch.float64 in {operand.dtype for operand in operands}:
            return operands
        dtype = torch.get_autocast_dtype(device)
        return operands[0].to(dtype), operands[1].to(dtype), operands[2].to(dtype)


def _run(
    op: str,
    arguments: _Arguments,
    top_k_index: torch.Tensor,
    routing: Routing | None,
    capacity: int | None,
    check_indices: bool,
    implementation: str,
) -> torch.Tensor:
    """What the passes share: the checks of routing, the choice, the counts, the autograd function."""
    hidden_states, gate_up_proj, down = arguments.operands()
    num_experts = gate_up_proj.shape[0]
    checks.check_routing(op, num_experts, hidden_states, top_k_index, arguments.top_k_weights, routing)
    checks.check_capacity(op, capacity)
    dtype = torch.promote_types(torch.promote_types(hidden_states.dtype, gate_up_proj.dtype), down.dtype)
    device = hidden_states.device.type
    unfit = _triton_unfit(op, arguments, top_k_index, capacity, dtype)
    choice, reason = _choose(op, arguments, top_k_index, dtype, implementation, unfit)
    tiles = None
    if choice.implementation == TRITON:
        tiles = _tiles(op, hidden_states.device, dtype, top_k_index.numel() / num_experts)
    if routing is None:
        routing = route(top_k_index, num_experts, tile_rows=TILE_ROWS if tiles is None else tiles.rows)
    if check_indices:
        checks.check_indices_in_range(op, routing)
    _count(f"moe.{op}", choice.implementation, routing, capacity, reason)
    with torch.autocast(device, enabled=False):
        if tiles is not None:
            return _run_triton(arguments, routing, tiles, dtype)
        return _ExpertPass.apply(
            hidden_states, gate_up_proj, arguments.scale, down, arguments.top_k_weights, arguments.residual,
            arguments.width, _LAYOUTS[choice.implementation](routing, capacity, dtype), dtype,
        )  # fmt: skip


def _tiles(op: str, device: torch.device, dtype: torch.dtype, rows_an_expert: float) -> latent_tiles.Tiles | Tiles:
    if op == "latent_glu_experts":
        return latent_tiles.tiles_on(device, dtype)
    return tiles_on(device, dtype, rows_an_expert)


def _run_triton(
    arguments: _Arguments, routing: Routing, tiles: latent_tiles.Tiles | Tiles, dtype: torch.dtype
) -> torch.Tensor:
    # imported here, because a plain `import dormouse_kernels` must not wait for triton
    from dormouse_kernels.moe.grouped.experts import swiglu_experts
    from dormouse_kernels.moe.latent.op import latent_experts
    from dormouse_kernels.moe.latent.plan import plan_for

    hidden_states, gate_up_proj, down = arguments.operands()
    if isinstance(tiles, Tiles):
        return swiglu_experts(hidden_states, gate_up_proj, down, arguments.top_k_weights, routing, tiles, dtype)
    return latent_experts(
        hidden_states, gate_up_proj, _given(arguments.scale), down, arguments.top_k_weights, arguments.residual,
        plan_for(routing, tiles), dtype,
    )  # fmt: skip


def _choose(
    op: str,
    arguments: _Arguments,
    top_k_index: torch.Tensor,
    dtype: torch.dtype,
    implementation: str,
    unfit: tuple[str, str] | None,
) -> tuple[Choice, str]:
    """The choice, and the reason of a fallback. Errors: `ValueError` for "triton" by name where it cannot run."""
    hidden_states, down = arguments.hidden_states, arguments.down

    def choice(name: str) -> Choice:
        return choose(
            op, implementation=name, T=hidden_states.shape[0], k=top_k_index.shape[1], num_experts=down.shape[0],
            d=hidden_states.shape[1], r=down.shape[2], f=down.shape[1], dtype=dtype, device=hidden_states.device.type,
        )  # fmt: skip

    chosen = choice(implementation)
    if chosen.implementation != TRITON or unfit is None:
        return chosen, ""
    if implementation == TRITON:
        raise ValueError(
            f"{op}: implementation='triton' cannot take {unfit[1]}; pass implementation='padded' or 'reference'"
        )
    return choice("padded"), unfit[0]


def _triton_unfit(
    op: str, arguments: _Arguments, top_k_index: torch.Tensor, capacity: int | None, dtype: torch.dtype
) -> tuple[str, str] | None:
    """(a fallback's reason, what the Triton kernels cannot take), or None: what only the call itself shows."""
    if capacity is not None:
        return "capacity", f"capacity={capacity}: it drops nothing"
    device, k = arguments.hidden_states.device.type, top_k_index.shape[1]
    if device != "cuda" and not (device == "cpu" and interpreting()):
        return "device", f"tensors on {device}: it needs a CUDA device"
    if dtype == torch.float64 or k < 1:
        return "dtype", f"{dtype} with k = {k}: it takes up to four bytes an element, and k of at least 1"
    if op != "latent_glu_experts":
        return None
    for name, bank in (
        ("gate_up_proj", arguments.gate_up_proj),
        ("scale", _given(arguments.scale)),
        ("v", arguments.down),
    ):
        if not bank.is_contiguous():
            return "strides", f"{name} with strides {bank.stride()}: it reads contiguous banks"
    rank = arguments.down.shape[2]
    if rank not in TRITON_RANKS:
        return "rank", f"rank {rank}: it has tiles for {', '.join(map(str, TRITON_RANKS))}"
    return None


def _given(scale: torch.Tensor | None) -> torch.Tensor:
    assert scale is not None
    return scale


def _count(site: str, implementation: str, routing: Routing, capacity: int | None, reason: str) -> None:
    active = counters.current()
    if active is None:
        return
    active.count(site, implementation, reason=reason)
    active.count_rows(site, "bad_index", routing.bad_indices())
    if capacity is not None:
        active.count_rows(site, "dropped", (routing.counts - capacity).clamp_(min=0).sum())


class _ExpertPass(torch.autograd.Function):
    """`gated` on one layout, with the residual added before the one rounding."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        gate_up_proj: torch.Tensor,
        scale: torch.Tensor | None,
        down: torch.Tensor,
        top_k_weights: torch.Tensor,
        residual: torch.Tensor | None,
        width: int,
        layout: Layout,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        out, pq = gated.forward(layout, hidden_states, gate_up_proj, scale, down, top_k_weights, width)
        f = down.shape[1]
        if residual is not None:
            out[:, :f] += residual[:, :f]
        ctx.save_for_backward(hidden_states, gate_up_proj, scale, down, top_k_weights, pq)
        ctx.layout = layout
        ctx.residual_dtype = None if residual is None else residual.dtype
        return out.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_states, gate_up_proj, scale, down, top_k_weights, pq = ctx.saved_tensors
        f = down.shape[1]
        grads = gated.backward(
            ctx.layout, grad_out[:, :f], pq, hidden_states, gate_up_proj, scale, down, top_k_weights,
            ctx.needs_input_grad[:5],
        )  # fmt: skip
        grad_residual = None
        if ctx.residual_dtype is not None and ctx.needs_input_grad[5]:
            grad_residual = grad_out.to(ctx.residual_dtype)
            if f < grad_out.shape[1]:
                grad_residual = torch.nn.functional.pad(grad_residual[:, :f], (0, grad_out.shape[1] - f))
        return (
            _cast(grads.hidden_states, hidden_states),
            _cast(grads.gate_up_proj, gate_up_proj),
            _cast(grads.scale, scale),
            _cast(grads.down, down),
            _cast(grads.top_k_weights, top_k_weights),
            grad_residual,
            None,
            None,
            None,
        )


def _cast(gradient: torch.Tensor | None, argument: torch.Tensor | None) -> torch.Tensor | None:
    return gradient if gradient is None or argument is None else gradient.to(argument.dtype)
