"""One expert pass, forward and backward, behind one interface: what eager autograd and the compiled ops both call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable

from dormouse_kernels.moe import gated
from dormouse_kernels.moe.grouped import tiles as grouped_tiles
from dormouse_kernels.moe.latent import tiles as latent_tiles
from dormouse_kernels.moe.layout import Layout
from dormouse_kernels.moe.padded import PaddedRows
from dormouse_kernels.moe.reference import SortedRows
from dormouse_kernels.moe.routing import Routing
from dormouse_kernels.moe.routing.route import TILE_ROWS
from dormouse_kernels.moe.selection import TRITON

_LAYOUTS: dict[str, Callable[[Routing, int | None, torch.dtype], Layout]] = {
    "reference": SortedRows,
    "padded": PaddedRows,
}
Gradients = tuple[torch.Tensor | None, ...]
Tiles = latent_tiles.Tiles | grouped_tiles.Tiles


class Operands(NamedTuple):
    """The floats of a pass, checked; `down` is V or the down projection. Gradients come in this order."""

    hidden_states: torch.Tensor
    gate_up_proj: torch.Tensor
    scale: torch.Tensor | None
    down: torch.Tensor
    top_k_weights: torch.Tensor
    residual: torch.Tensor | None

    def named(self, down: str) -> dict[str, torch.Tensor]:
        """Those that are given, by the names that the caller knows them by."""
        names = ("hidden_states", "gate_up_proj", "scale", down, "top_k_weights", "residual")
        return {name: tensor for name, tensor in zip(names, self, strict=True) if tensor is not None}


class Pass(Protocol):
    """An implementation over one routing."""

    def forward(self, operands: Operands) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The result, and what the backward needs beside the operands."""
        ...

    def backward(
        self, operands: Operands, saved: list[torch.Tensor], grad: torch.Tensor, wanted: tuple[bool, ...]
    ) -> Gradients:
        """Gradients of the operands but the residual, each in its own dtype; None where not `wanted`."""
        ...


@dataclass(frozen=True)
class LayoutPass:
    """`gated` on a layout of rows, with the residual added before the one rounding."""

    layout: Layout
    width: int
    dtype: torch.dtype
    keep: bool
    """Whether the backward gets [p, q]; otherwise it makes them again."""

    def forward(self, operands: Operands) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The result in `dtype`, and [p, q] where it is kept."""
        out, pq = gated.forward(self.layout, *operands[:5], self.width)
        f = operands.down.shape[1]
        if operands.residual is not None:
            out[:, :f] += operands.residual[:, :f]
        return out.to(self.dtype), [pq] if self.keep else []

    def backward(
        self, operands: Operands, saved: list[torch.Tensor], grad: torch.Tensor, wanted: tuple[bool, ...]
    ) -> Gradients:
        """As `Pass.backward`."""
        pq = saved[0] if saved else gated.projections(self.layout, operands.hidden_states, operands.gate_up_proj)
        f = operands.down.shape[1]
        grads = gated.backward(self.layout, grad[:, :f], pq, *operands[:5], wanted[:5])
        return tuple(
            gradient if gradient is None or operand is None else gradient.to(operand.dtype)
            for gradient, operand in zip(grads, operands[:5], strict=True)
        )


def make_pass(
    implementation: str,
    operands: Operands,
    routing: Routing,
    capacity: int | None,
    width: int,
    *,
    keep: bool = True,
    tiles: Tiles | None = None,
) -> Pass:
    """The pass of an implementation that fits these operands. `keep` matters to a layout's, `tiles` to Triton's."""
    dtype = compute_dtype(operands)
    if implementation != TRITON:
        return LayoutPass(_LAYOUTS[implementation](routing, capacity, dtype), width, dtype, keep)
    # here, because a plain `import dormouse_kernels` must not wait for triton
    from dormouse_kernels.moe.grouped.experts import SwigluPass
    from dormouse_kernels.moe.latent.op import LatentPass

    if operands.scale is None:
        assert not isinstance(tiles, latent_tiles.Tiles)
        return SwigluPass.over(routing, dtype, tiles)
    assert not isinstance(tiles, grouped_tiles.Tiles)
    return LatentPass.over(routing, dtype, operands.down.shape[2], tiles)


def tile_rows(implementation: str, operands: Operands, slots: int) -> int:
    """Rows of the tiles that an implementation reads first over `slots` rows, on these operands' device."""
    if implementation != TRITON:
        return TILE_ROWS
    device, dtype = operands.hidden_states.device, compute_dtype(operands)
    if operands.scale is None:
        return grouped_tiles.tiles_on(device, dtype, slots / operands.down.shape[0]).rows
    return latent_tiles.tiles_on(device, dtype, operands.down.shape[2]).rows


def pack_tiles(tiles: Tiles | None) -> list[int]:
    """Tiles as the numbers that a registered op takes; none for None."""
    if tiles is None:
        return []
    if isinstance(tiles, latent_tiles.Tiles):
        return [int(getattr(tiles, name)) for name in latent_tiles.Tiles.__match_args__]
    parts = [getattr(tiles, name) for name in grouped_tiles.Tiles.__match_args__]
    return [getattr(part, name) for part in parts for name in grouped_tiles.Tile.__match_args__]


def unpack_tiles(numbers: list[int], *, latent: bool) -> Tiles | None:
    """The tiles that `pack_tiles` took apart."""
    if not numbers:
        return None
    if latent:
        *sizes, turns, pdl = numbers
        return latent_tiles.Tiles(*sizes, turns=bool(turns), pdl=bool(pdl))
    size = len(grouped_tiles.Tile.__match_args__)
    parts = [grouped_tiles.Tile(*numbers[at : at + size]) for at in range(0, len(numbers), size)]
    return grouped_tiles.Tiles(*parts)


def compute_dtype(operands: Operands) -> torch.dtype:
    """What the matrix products' operands are promoted to, and the result's dtype."""
    wider = torch.promote_types(operands.hidden_states.dtype, operands.gate_up_proj.dtype)
    return torch.promote_types(wider, operands.down.dtype)


def residual_gradient(grad: torch.Tensor, dtype: torch.dtype, f: int) -> torch.Tensor:
    """`grad` in the residual's dtype; zero in the pad columns, which reach no output."""
    grad = grad.to(dtype)
    if f < grad.shape[1]:
        grad = torch.nn.functional.pad(grad[:, :f], (0, grad.shape[1] - f))
    return grad


class ExpertPass(torch.autograd.Function):
    """A `Pass` under autograd. Saves the operands but the residual, and what the pass asks for."""

    @staticmethod
    def forward(
        ctx: Any,
        work: Pass,
        hidden_states: torch.Tensor,
        gate_up_proj: torch.Tensor,
        scale: torch.Tensor | None,
        down: torch.Tensor,
        top_k_weights: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        out, saved = work.forward(Operands(hidden_states, gate_up_proj, scale, down, top_k_weights, residual))
        ctx.save_for_backward(hidden_states, gate_up_proj, scale, down, top_k_weights, *saved)
        ctx.work = work
        ctx.residual_dtype = None if residual is None else residual.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        hidden_states, gate_up_proj, scale, down, top_k_weights, *saved = ctx.saved_tensors
        operands = Operands(hidden_states, gate_up_proj, scale, down, top_k_weights, None)
        wanted = ctx.needs_input_grad[1:]
        grads = ctx.work.backward(operands, saved, grad, wanted)
        grad_residual = residual_gradient(grad, ctx.residual_dtype, down.shape[1]) if wanted[5] else None
        return None, *grads, grad_residual
