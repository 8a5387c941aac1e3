"""Expert passes that others would run: torch's own products, and packages when they are installed.

Each function returns an `Experts`; one that needs a package imports it there and raises `ImportError` without it.
Products run in the operands' dtype, as their users run them; the routing weight multiplies the last inner activation,
where a product follows at once, unless the peer's own function says where.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import silu

if TYPE_CHECKING:
    from dormouse_bench.moe.arms import Experts
    from dormouse_bench.moe.problem import Problem

GroupedMm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""rows [R, n] sorted by expert, bank [E, n, m], offsets [E] int32 (where each expert's rows end) -> [R, m]."""


def torch_bmm(capacity: int | None) -> Experts:
    """Every expert's rows in a buffer [E, C, d], two `torch.bmm`, a gather back; C the largest count without one."""

    def experts(problem: Problem, residual: torch.Tensor | None) -> torch.Tensor:
        tokens, k = problem.top_k_index.shape
        order, counts, experts_of = _sorted(problem)
        width = int(counts.max()) if capacity is None else capacity
        place = torch.arange(order.numel(), device=order.device) - (counts.cumsum(0) - counts)[experts_of]
        cells = problem.shape.experts * width
        # rows over capacity share one cell behind the last; it is cut off before the products and reads zero after
        cell = torch.where(place < width, experts_of * width + place, cells)
        x = problem.hidden_states
        buffer = x.new_zeros(cells + 1, x.shape[1]).index_copy(0, cell, x.index_select(0, order // k))[:-1]
        weight = problem.top_k_weights.new_zeros(cells + 1)
        weight = weight.index_copy(0, cell, problem.top_k_weights.flatten().index_select(0, order))[:-1]
        z = _glu(
            torch.bmm(buffer.view(-1, width, x.shape[1]), problem.gate_up_proj.mT),
            None if problem.scale is None else problem.scale.unsqueeze(1),
            weight.view(-1, width, 1),
        )
        h = torch.bmm(z, problem.down.mT).flatten(0, 1)
        cell_of_slot = torch.empty_like(cell).scatter_(0, order, cell)
        # a product with ones and zeros adds up a token's rows without a masked copy of them
        live = (cell_of_slot < cells).to(h.dtype).view(tokens, 1, k)
        out = (live @ h.index_select(0, cell_of_slot.clamp(max=cells - 1)).view(tokens, k, -1)).squeeze(1)
        return out if residual is None else out + residual

    return experts


def torch_grouped_mm() -> Experts:
    """`torch._grouped_mm` over rows sorted by expert."""
    return grouped(lambda rows, bank, ends: torch._grouped_mm(rows, bank, offs=ends))


def grouped_mm_bf16() -> Experts:
    """The package grouped-mm-bf16: torch's semantics, in Triton."""
    from grouped_mm_bf16 import grouped_mm

    return grouped(lambda rows, bank, ends: grouped_mm(rows, bank, offs=ends))


def grouped(mm: GroupedMm) -> Experts:
    """Sort the rows by expert, two grouped products, sort back, add up each token's rows."""

    def experts(problem: Problem, residual: torch.Tensor | None) -> torch.Tensor:
        tokens, k = problem.top_k_index.shape
        order, counts, experts_of = _sorted(problem)
        ends = counts.cumsum(0).to(torch.int32)
        pq = mm(problem.hidden_states.index_select(0, order // k), problem.gate_up_proj.mT, ends)
        scale = None if problem.scale is None else problem.scale.index_select(0, experts_of)
        z = _glu(pq, scale, problem.top_k_weights.flatten().index_select(0, order).unsqueeze(1))
        h = mm(z, problem.down.mT, ends)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        out = h.index_select(0, inverse).view(tokens, k, -1).sum(1)
        return out if residual is None else out + residual

    return experts


def scattermoe() -> Experts:
    """ScatterMoE's `parallel_linear`, gather and scatter inside; the gates in its own second product."""
    package = importlib.import_module("scattermoe.parallel_experts")  # on no index: only from a checkout

    def experts(problem: Problem, residual: torch.Tensor | None) -> torch.Tensor:
        k = problem.shape.k
        sorted_experts, sorted_slots, ends = package.flatten_sort_count(problem.top_k_index, problem.shape.experts)
        rows = sorted_experts, sorted_slots, ends
        up, down = problem.gate_up_proj.permute(0, 2, 1), problem.down.permute(0, 2, 1)
        pq = package.parallel_linear(problem.hidden_states, up, k, *rows, grouped_out=True)
        scale = None if problem.scale is None else problem.scale.index_select(0, sorted_experts)
        z = _glu(pq, scale, None)
        gates = problem.top_k_weights.to(z.dtype)
        out = package.parallel_linear(z, down, 1, *rows, grouped_in=True, gates=gates)
        return out if residual is None else out + residual

    return experts


def transformers() -> Experts:
    """The `grouped_mm` experts function of transformers on a stand-in for its Qwen3 experts module."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    def gate(pq: torch.Tensor) -> torch.Tensor:
        p, q = pq.chunk(2, dim=-1)
        return silu(p) * q

    def experts(problem: Problem, residual: torch.Tensor | None) -> torch.Tensor:
        module: Any = SimpleNamespace(
            num_experts=problem.shape.experts, gate_up_proj=problem.gate_up_proj, down_proj=problem.down,
            has_gate=True, has_bias=False, is_transposed=False, has_post_expert_norm=False,
            _is_expert_parallel=False, _apply_gate=gate, act_fn=silu,
        )  # fmt: skip
        return grouped_mm_experts_forward(
            module, problem.hidden_states, problem.top_k_index, problem.top_k_weights
        )  # fmt: skip

    return experts


def liger() -> Experts:
    """liger-kernel's fused experts, whose routing reads one number back from the device."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    def experts(problem: Problem, residual: torch.Tensor | None) -> torch.Tensor:
        index = problem.top_k_index.to(torch.int32)
        return LigerFusedMoEFunction.apply(
            problem.hidden_states, problem.gate_up_proj, problem.down, index, problem.top_k_weights
        )

    return experts


def _sorted(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(slots in order of their expert, stably; rows of each expert; the expert of each sorted row), with no sync."""
    flat = problem.top_k_index.flatten()
    experts_of, order = flat.sort(stable=True)
    counts = torch.zeros(problem.shape.experts, dtype=torch.int64, device=flat.device)
    return order, counts.scatter_add_(0, flat, torch.ones_like(flat)), experts_of


def _glu(pq: torch.Tensor, scale: torch.Tensor | None, weight: torch.Tensor | None) -> torch.Tensor:
    """silu(p·s) · (q·s') · w in the dtype of pq."""
    if scale is not None:
        pq = pq * scale.to(pq.dtype)
    p, q = pq.chunk(2, dim=-1)
    z = silu(p) * q
    return z if weight is None else z * weight.to(z.dtype)
