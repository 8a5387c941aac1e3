"""Grouped products as functions of tensors: checks, choice of implementation, counting, autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from dormouse_kernels import counters
from dormouse_kernels.launch import interpreting
from dormouse_kernels.moe import checks
from dormouse_kernels.moe.grouped import reference
from dormouse_kernels.moe.routing import Routing
from dormouse_kernels.moe.selection import AUTO, TRITON

REFERENCE = "reference"
IMPLEMENTATIONS: tuple[str, ...] = (REFERENCE, TRITON)


def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    routing: Routing,
    *,
    gather: bool = False,
    scatter: bool = False,
    implementation: str = AUTO,
) -> torch.Tensor:
    """`out[i] = a[i] · b[e(i)]`: each sorted row times the matrix of its expert.

    a [R, K] in the sorted order of `routing`, R = T·k; with `gather` a [T, K], each row its token's. b [E, K, N] of
    any strides: a weight [E, N, K] is passed as its `.mT`, which copies nothing. The result is [R, N] in sorted order,
    with `scatter` in slot order: row t·k + j belongs to choice j of token t. Rows of sentinels are zeros. Any K, N.

    Dtypes: the operands' wider one, also the result's (under autocast its dtype); sums are fp32 (fp64 for fp64), and
    each gradient comes back in its argument's dtype. Gathered rows' gradients are summed by token in the order of
    slots. Saved for the backward: a and b. "triton" takes CUDA tensors of up to four bytes an element; "auto" falls
    back to "reference", which reads the routing's offsets: counted. Errors: `ValueError` or `TypeError`, naming the
    argument.
    """
    op = "grouped_mm"
    _check_rows(op, "a", a, routing, "T" if gather else "R")
    if b.dim() != 3 or 0 in b.shape:
        raise ValueError(f"{op}: b has shape {list(b.shape)}; pass [E, K, N], no dimension empty")
    if b.shape[1] != a.shape[1]:
        raise ValueError(f"{op}: a has {a.shape[1]} columns but b is {list(b.shape)}; pass b as [E, {a.shape[1]}, N]")
    if b.shape[0] != routing.num_experts:
        raise ValueError(f"{op}: routing is of {routing.num_experts} experts but b holds {b.shape[0]}; pass one each")
    checks.check_floats(op, {"a": a, "b": b})
    a, b = _autocast(a, b)
    dtype = torch.promote_types(a.dtype, b.dtype)
    with torch.autocast(a.device.type, enabled=False):
        if _choose(op, implementation, routing, dtype) == REFERENCE:
            return reference.multiply(a, b, routing, gather=gather, scatter=scatter)
        return _GroupedMm.apply(a, b, routing, gather, scatter, dtype)


def grouped_wgrad(
    a: torch.Tensor,
    g: torch.Tensor,
    routing: Routing,
    *,
    gather: bool = False,
    scatter: bool = False,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    implementation: str = AUTO,
) -> torch.Tensor:
    """`out[e] = Σ a[i]ᵀ g[i]` over the sorted rows i of expert e: the gradient of `grouped_mm`'s b, [E, K, N].

    a as `grouped_mm` takes it with the same `gather`; g [R, N] as its result lies with the same `scatter`. Zeros for
    an expert without rows. `out` [E, K, N], any dtype and strides, is written once, or with `accumulate` added to in
    fp32 and rounded once; without it the result has the operands' wider dtype and is differentiable. Everything else
    as `grouped_mm`. Errors: `ValueError` for `out` when a gradient is needed.
    """
    op = "grouped_wgrad"
    _check_rows(op, "a", a, routing, "T" if gather else "R")
    _check_rows(op, "g", g, routing, "R")
    named = {"a": a, "g": g} if out is None else {"a": a, "g": g, "out": out}
    checks.check_floats(op, named)
    shape = (routing.num_experts, a.shape[1], g.shape[1])
    if out is None and accumulate:
        raise ValueError(f"{op}: accumulate=True with out=None; pass the tensor to add to as out")
    if out is not None:
        checks.check_shape(op, "out", out, shape, "[E, K, N]")
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in named.values()):
            raise ValueError(f"{op}: out is given while a gradient is needed; call it under torch.no_grad()")
    a, g = _autocast(a, g)
    dtype = torch.promote_types(a.dtype, g.dtype)
    with torch.autocast(a.device.type, enabled=False):
        if _choose(op, implementation, routing, dtype) == REFERENCE:
            made = reference.wgrad(a, g, routing, gather=gather, scatter=scatter)
            if out is None:
                return made.to(dtype)
            return out.copy_(out.to(made.dtype) + made if accumulate else made)
        if out is None:
            return _GroupedWgrad.apply(a, g, routing, gather, scatter, dtype)
        _wgrad_into(out, a, g, routing, gather, scatter, dtype, accumulate=accumulate)
        return out


def _check_rows(op: str, name: str, rows: torch.Tensor, routing: Routing, letter: str) -> None:
    """`ValueError` unless `rows` is [R, n] or [T, n] on the routing's device, n at least 1."""
    count = routing.top_k_index.shape[0] if letter == "T" else routing.order.numel()
    if rows.dim() != 2 or rows.shape[0] != count or rows.shape[1] < 1:
        raise ValueError(f"{op}: {name} has shape {list(rows.shape)}; pass [{letter}, n] = [{count}, n], n at least 1")
    if rows.device != routing.order.device:
        raise ValueError(f"{op}: {name} is on {rows.device} but routing is on {routing.order.device}; move one of them")


def _autocast(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The operands, cast as autocast would cast a linear layer's."""
    device = a.device.type
    if not torch.is_autocast_enabled(device) or torch.float64 in (a.dtype, b.dtype):
        return a, b
    dtype = torch.get_autocast_dtype(device)
    return a.to(dtype), b.to(dtype)


def _choose(op: str, implementation: str, routing: Routing, dtype: torch.dtype) -> str:
    """The implementation, counted. Errors: `ValueError` for an unknown name, and for "triton" where it cannot run."""
    if implementation not in (AUTO, *IMPLEMENTATIONS):
        known = ", ".join((AUTO, *IMPLEMENTATIONS))
        raise ValueError(f"{op}: implementation is {implementation!r}; pass one of {known}")
    device, chosen, reason = routing.order.device.type, implementation, ""
    unfit = _triton_unfit(device, dtype)
    if implementation == TRITON and unfit:
        raise ValueError(f"{op}: implementation='triton' cannot take {unfit[1]}; pass implementation='reference'")
    if implementation == AUTO:
        chosen = TRITON if device == "cuda" and not unfit else REFERENCE
        reason = unfit[0] if unfit and device == "cuda" else ""
    active = counters.current()
    if active is not None:
        active.count(f"moe.{op}", chosen, reason=reason)
        active.count_rows(f"moe.{op}", "bad_index", routing.bad_indices())
    return chosen


def _triton_unfit(device: str, dtype: torch.dtype) -> tuple[str, str] | None:
    """(a fallback's reason, what the Triton kernels cannot take), or None."""
    if device != "cuda" and not (device == "cpu" and interpreting()):
        return "device", f"tensors on {device}: it needs a CUDA device"
    if dtype == torch.float64:
        return "dtype", f"{dtype}: it takes up to four bytes an element"
    return None


class _GroupedMm(torch.autograd.Function):
    """`a[i] · b[e(i)]` by the Triton kernels. Saves a and b."""

    @staticmethod
    def forward(
        ctx: Any,
        a: torch.Tensor,
        b: torch.Tensor,
        routing: Routing,
        gather: bool,
        scatter: bool,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.routing, ctx.gather, ctx.scatter, ctx.dtype = routing, gather, scatter, dtype
        return _multiply(a.to(dtype), b, routing, gather, scatter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b = ctx.saved_tensors
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = _data_gradient(grad.to(ctx.dtype), b, ctx.routing, ctx.gather, ctx.scatter, a.dtype)
        if ctx.needs_input_grad[1]:
            grad_b = torch.empty_like(b)
            _wgrad_into(grad_b, a, grad, ctx.routing, ctx.gather, ctx.scatter, ctx.dtype)
        return grad_a, grad_b, None, None, None, None


class _GroupedWgrad(torch.autograd.Function):
    """`Σ a[i]ᵀ g[i]` by the Triton kernels. Saves a and g."""

    @staticmethod
    def forward(
        ctx: Any,
        a: torch.Tensor,
        g: torch.Tensor,
        routing: Routing,
        gather: bool,
        scatter: bool,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.save_for_backward(a, g)
        ctx.routing, ctx.gather, ctx.scatter, ctx.dtype = routing, gather, scatter, dtype
        out = torch.empty(routing.num_experts, a.shape[1], g.shape[1], dtype=dtype, device=a.device)
        _wgrad_into(out, a, g, routing, gather, scatter, dtype)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, g = ctx.saved_tensors
        grad_a = grad_g = None
        if ctx.needs_input_grad[0]:
            grad_a = _data_gradient(g.to(ctx.dtype), grad, ctx.routing, ctx.gather, ctx.scatter, a.dtype)
        if ctx.needs_input_grad[1]:
            grad_g = _multiply(a.to(ctx.dtype), grad, ctx.routing, ctx.gather, ctx.scatter).to(g.dtype)
        return grad_a, grad_g, None, None, None, None


def _multiply(a: torch.Tensor, b: torch.Tensor, routing: Routing, gather: bool, scatter: bool) -> torch.Tensor:
    # here, because a plain `import dormouse_kernels` must not wait for triton
    from dormouse_kernels.moe.grouped import launches

    tile = launches.tiles_of(routing, a.dtype).mm
    source = launches.TOKEN if gather else launches.SORTED
    target = launches.SLOT if scatter else launches.SORTED
    return launches.multiply(a, b, routing, routing.cut(tile.rows), tile, source=source, target=target)


def _data_gradient(
    g: torch.Tensor, b: torch.Tensor, routing: Routing, gather: bool, scatter: bool, dtype: torch.dtype
) -> torch.Tensor:
    """The gradient of a: g · bᵀ by rows, summed by token if a's rows were gathered."""
    from dormouse_kernels.moe.grouped import launches

    tile = launches.tiles_of(routing, g.dtype).mm
    source = launches.SLOT if scatter else launches.SORTED
    target = launches.SLOT if gather else launches.SORTED
    rows = launches.multiply(g, b.mT, routing, routing.cut(tile.rows), tile, source=source, target=target)
    return launches.sum_by_token(rows, routing, dtype) if gather else rows.to(dtype)


def _wgrad_into(
    out: torch.Tensor,
    a: torch.Tensor,
    g: torch.Tensor,
    routing: Routing,
    gather: bool,
    scatter: bool,
    dtype: torch.dtype,
    *,
    accumulate: bool = False,
) -> None:
    from dormouse_kernels.moe.grouped import launches

    tile = launches.tiles_of(routing, dtype).wgrad
    sources = (
        launches.TOKEN if gather else launches.SORTED,
        launches.SLOT if scatter else launches.SORTED,
    )
    launches.wgrad(a.to(dtype), g.to(dtype), routing, out, tile, sources=sources, accumulate=accumulate)
