"""What the expert passes share: routing, the choice of an implementation, counting, and who differentiates."""

from __future__ import annotations

import torch

from dormouse_kernels.launch import interpreting
from dormouse_kernels.moe import checks, library
from dormouse_kernels.moe.counting import count
from dormouse_kernels.moe.passes import ExpertPass, Operands, Tiles, compute_dtype, make_pass, pack_tiles, tile_rows
from dormouse_kernels.moe.routing import Routing, route
from dormouse_kernels.moe.selection import TRITON, TRITON_RANKS, Choice, choose


def run(
    op: str,
    operands: Operands,
    width: int,
    top_k_index: torch.Tensor,
    routing: Routing | None,
    capacity: int | None,
    check_indices: bool,
    implementation: str,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """A pass over operands whose shapes fit, [T, width] in their widest dtype."""
    operands = _autocast(operands)
    hidden_states = operands.hidden_states
    num_experts = operands.gate_up_proj.shape[0]
    checks.check_routing(op, num_experts, hidden_states, top_k_index, operands.top_k_weights, routing)
    checks.check_capacity(op, capacity)
    choice, reason = _choose(op, operands, top_k_index, capacity, implementation)
    if tiles is not None and choice.implementation != TRITON:
        raise ValueError(
            f"{op}: tiles is given but implementation {choice.implementation!r} runs, which has none; "
            "pass tiles=None, or implementation='triton' where it can run"
        )
    if routing is None:
        rows = tile_rows(choice.implementation, operands, top_k_index.numel()) if tiles is None else tiles.rows
        routing = route(top_k_index, num_experts, tile_rows=rows)
    if check_indices:
        checks.check_indices_in_range(op, routing)
    if torch.compiler.is_compiling():
        return library.call(op, operands, width, routing, capacity, choice.implementation, reason, pack_tiles(tiles))
    count(op, choice.implementation, routing, capacity, reason)
    with torch.autocast(hidden_states.device.type, enabled=False):
        work = make_pass(choice.implementation, operands, routing, capacity, width, tiles=tiles)
        return ExpertPass.apply(work, *operands)


def _autocast(operands: Operands) -> Operands:
    """The matrix products' operands cast as autocast would cast a linear layer's."""
    matrices = operands.hidden_states, operands.gate_up_proj, operands.down
    device = operands.hidden_states.device.type
    if not torch.is_autocast_enabled(device) or torch.float64 in {matrix.dtype for matrix in matrices}:
        return operands
    hidden_states, gate_up_proj, down = (matrix.to(torch.get_autocast_dtype(device)) for matrix in matrices)
    return operands._replace(hidden_states=hidden_states, gate_up_proj=gate_up_proj, down=down)


def _choose(
    op: str, operands: Operands, top_k_index: torch.Tensor, capacity: int | None, implementation: str
) -> tuple[Choice, str]:
    """The choice, and the reason of a fallback. Errors: `ValueError` for "triton" by name where it cannot run."""
    hidden_states, down = operands.hidden_states, operands.down
    dtype = compute_dtype(operands)

    def choice(name: str) -> Choice:
        return choose(
            op, implementation=name, T=hidden_states.shape[0], k=top_k_index.shape[1], num_experts=down.shape[0],
            d=hidden_states.shape[1], r=down.shape[2], f=down.shape[1], dtype=dtype, device=hidden_states.device.type,
        )  # fmt: skip

    chosen = choice(implementation)
    if chosen.implementation != TRITON:
        return chosen, ""
    unfit = _triton_unfit(operands, top_k_index, capacity, dtype)
    if unfit is None:
        return chosen, ""
    if implementation == TRITON:
        raise ValueError(
            f"{op}: implementation='triton' cannot take {unfit[1]}; pass implementation='padded' or 'reference'"
        )
    return choice("padded"), unfit[0]


def _triton_unfit(
    operands: Operands, top_k_index: torch.Tensor, capacity: int | None, dtype: torch.dtype
) -> tuple[str, str] | None:
    """(a fallback's reason, what the Triton kernels cannot take), or None: what only the call itself shows."""
    if capacity is not None:
        return "capacity", f"capacity={capacity}: it drops nothing"
    device, k = operands.hidden_states.device.type, top_k_index.shape[1]
    if device != "cuda" and not (device == "cpu" and interpreting()):
        return "device", f"tensors on {device}: it needs a CUDA device"
    if dtype == torch.float64 or k < 1:
        return "dtype", f"{dtype} with k = {k}: it takes up to four bytes an element, and k of at least 1"
    if operands.scale is None:
        return None
    for name, bank in (("gate_up_proj", operands.gate_up_proj), ("scale", operands.scale), ("v", operands.down)):
        if not bank.is_contiguous():
            return "strides", f"{name} with strides {bank.stride()}: it reads contiguous banks"
    rank = operands.down.shape[2]
    if rank not in TRITON_RANKS:
        return "rank", f"rank {rank}: it has tiles for {', '.join(map(str, TRITON_RANKS))}"
    return None
