"""The expert passes and `route` as `torch.library` ops, which `torch.compile` keeps whole in its graph.

Eager calls do not come through here: a dispatch through the registry costs more than some of the kernels. The layouts'
[p, q] have shapes that the indices decide, which a graph cannot know, so their backward makes them again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dormouse_kernels.moe.counting import count
from dormouse_kernels.moe.passes import Operands, compute_dtype, make_pass, residual_gradient, unpack_tiles
from dormouse_kernels.moe.routing import Routing, TileMap
from dormouse_kernels.moe.routing.tilemap import most_tiles
from dormouse_kernels.moe.selection import TRITON


def call(
    op: str,
    operands: Operands,
    width: int,
    routing: Routing,
    capacity: int | None,
    implementation: str,
    reason: str,
    tiles: list[int],
) -> Tensor:
    """A pass as one node of a graph: [T, width]."""
    out, *_ = expert_pass(
        op, *operands, routing.top_k_index, pack(routing), tile_rows(routing), width, capacity, implementation, reason,
        tiles,
    )  # fmt: skip
    return out


def pack(routing: Routing) -> list[Tensor]:
    """A routing's tensors, its tile map's after them."""
    tensors = [routing.counts, routing.offsets, routing.order, routing.inverse]
    tile_map = routing.tile_map
    return tensors if tile_map is None else [*tensors, tile_map.start, tile_map.tiles, tile_map.long]


def tile_rows(routing: Routing) -> int:
    """The size of a routing's own tiles, 0 where it has none."""
    return 0 if routing.tile_map is None else routing.tile_map.rows


def unpack(top_k_index: Tensor, tensors: list[Tensor], rows: int) -> Routing:
    """The routing that `pack` took apart."""
    counts, offsets, order, inverse, *tiles = tensors
    made = TileMap(rows, *tiles, max_tiles=tiles[1].numel() // 4) if tiles else None
    return Routing(top_k_index, counts.numel(), counts, offsets, order, inverse, made)


@torch.library.custom_op("dormouse::route", mutates_args=())
def sort(top_k_index: Tensor, num_experts: int, rows: int) -> list[Tensor]:
    """`route` in Triton: counts, offsets, order, inverse, and the tile map's start, tiles and long."""
    from dormouse_kernels.moe.routing.sort import sort_slots

    # copies, because a registered op's results may share no memory, and the sort's are views of one buffer
    return [tensor.clone() for tensor in pack(sort_slots(top_k_index, num_experts, rows))]


@sort.register_fake
def _(top_k_index: Tensor, num_experts: int, rows: int) -> list[Tensor]:
    slots = top_k_index.numel()
    tiles = 4 * most_tiles(rows, num_experts, slots)
    long = [top_k_index.new_empty(n, dtype=torch.int64) for n in (num_experts, num_experts + 1)]
    short = [slots, slots, num_experts + 2, tiles, num_experts + 1]
    return long + [top_k_index.new_empty(n, dtype=torch.int32) for n in short]


@torch.library.custom_op("dormouse::expert_pass", mutates_args=())
def expert_pass(
    op: str,
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    scale: Tensor | None,
    down: Tensor,
    top_k_weights: Tensor,
    residual: Tensor | None,
    top_k_index: Tensor,
    routing: list[Tensor],
    rows: int,
    width: int,
    capacity: int | None,
    implementation: str,
    reason: str,
    tiles: list[int],
) -> list[Tensor]:
    """The result, and what the backward needs beside the arguments."""
    operands = Operands(hidden_states, gate_up_proj, scale, down, top_k_weights, residual)
    routed = unpack(top_k_index, routing, rows)
    count(op, implementation, routed, capacity, reason)
    with torch.autocast(hidden_states.device.type, enabled=False):
        given = unpack_tiles(tiles, latent=scale is not None)
        work = make_pass(implementation, operands, routed, capacity, width, keep=False, tiles=given)
        out, saved = work.forward(operands)
    return [out, *saved]


@expert_pass.register_fake
def _(
    op: str, hidden_states: Tensor, gate_up_proj: Tensor, scale: Tensor | None, down: Tensor, top_k_weights: Tensor,
    residual: Tensor | None, top_k_index: Tensor, routing: list[Tensor], rows: int, width: int, capacity: int | None,
    implementation: str, reason: str, tiles: list[int],
) -> list[Tensor]:  # fmt: skip
    operands = Operands(hidden_states, gate_up_proj, scale, down, top_k_weights, residual)
    dtype = compute_dtype(operands)
    slots, double = top_k_index.numel(), gate_up_proj.shape[1]
    kept = [] if implementation != TRITON else [double] if scale is None else [double // 2, double]
    out = hidden_states.new_empty(hidden_states.shape[0], width, dtype=dtype)
    return [out, *(hidden_states.new_empty(slots, n, dtype=dtype) for n in kept)]


@torch.library.custom_op("dormouse::expert_pass_backward", mutates_args=())
def expert_pass_backward(
    grad: Tensor,
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    scale: Tensor | None,
    down: Tensor,
    top_k_weights: Tensor,
    saved: list[Tensor],
    top_k_index: Tensor,
    routing: list[Tensor],
    rows: int,
    width: int,
    capacity: int | None,
    implementation: str,
    tiles: list[int],
    wanted: list[bool],
) -> list[Tensor]:
    """The wanted gradients of the five operands, in their order."""
    operands = Operands(hidden_states, gate_up_proj, scale, down, top_k_weights, None)
    routed = unpack(top_k_index, routing, rows)
    with torch.autocast(grad.device.type, enabled=False):
        given = unpack_tiles(tiles, latent=scale is not None)
        work = make_pass(implementation, operands, routed, capacity, width, keep=False, tiles=given)
        grads = work.backward(operands, saved, grad, tuple(wanted))
    return [gradient for gradient, needed in zip(grads, wanted, strict=True) if needed and gradient is not None]


@expert_pass_backward.register_fake
def _(
    grad: Tensor, hidden_states: Tensor, gate_up_proj: Tensor, scale: Tensor | None, down: Tensor,
    top_k_weights: Tensor, saved: list[Tensor], top_k_index: Tensor, routing: list[Tensor], rows: int, width: int,
    capacity: int | None, implementation: str, tiles: list[int], wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    operands = (hidden_states, gate_up_proj, scale, down, top_k_weights)
    return [
        torch.empty_like(operand, memory_format=torch.contiguous_format)
        for operand, needed in zip(operands, wanted, strict=True)
        if needed and operand is not None
    ]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, hidden, gate_up, scale, down, weights, residual, index, routing, *constants = inputs
    rows, width, capacity, implementation, _, tiles = constants
    ctx.save_for_backward(hidden, gate_up, scale, down, weights, index, *routing, *output[1:])
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.constants = len(routing), rows, width, capacity, implementation, tiles


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    hidden, gate_up, scale, down, weights, index, *rest = ctx.saved_tensors
    many, *constants = ctx.constants
    grad = grads[0]
    assert grad is not None
    operands = hidden, gate_up, scale, down, weights
    *needed, need_residual = ctx.needs_input_grad[1:7]
    wanted = [need and operand is not None for need, operand in zip(needed, operands, strict=True)]
    routing = rest[:many]
    made = iter(expert_pass_backward(grad, *operands, rest[many:], index, routing, *constants, wanted))
    operand_grads = [next(made) if want else None for want in wanted]
    residual = residual_gradient(grad, ctx.residual_dtype, down.shape[1]) if need_residual else None
    # of the inputs' structure: a list of no gradients for a list of numbers
    no_tiles = [None] * len(constants[-1])
    return None, *operand_grads, residual, None, [None] * many, None, None, None, None, None, no_tiles


expert_pass.register_autograd(_backward, setup_context=_setup)
