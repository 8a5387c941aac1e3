"""Grouped products as functions of tensors: checks, choice of implementation, counting."""

from __future__ import annotations

import torch

from dormouse_kernels.launch import interpreting
from dormouse_kernels.moe import checks
from dormouse_kernels.moe.counting import count
from dormouse_kernels.moe.grouped import library
from dormouse_kernels.moe.grouped.products import GroupedMm, GroupedWgrad, Products
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
    chosen, reason = _choose(op, implementation, routing, dtype)
    products = Products(routing, gather, scatter, dtype, chosen)
    if torch.compiler.is_compiling():
        return library.call(op, products, a, b, reason)
    count(op, chosen, routing, None, reason)
    with torch.autocast(a.device.type, enabled=False):
        return GroupedMm.apply(products, a, b)


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
    chosen, reason = _choose(op, implementation, routing, dtype)
    products = Products(routing, gather, scatter, dtype, chosen)
    if torch.compiler.is_compiling():
        if out is None:
            return library.call(op, products, a, g, reason)
        library.call_into(products, a, g, out, accumulate, reason)
        return out
    count(op, chosen, routing, None, reason)
    with torch.autocast(a.device.type, enabled=False):
        if out is None:
            return GroupedWgrad.apply(products, a, g)
        return products.weight_gradient(a, g, out, accumulate=accumulate)


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


def _choose(op: str, implementation: str, routing: Routing, dtype: torch.dtype) -> tuple[str, str]:
    """The implementation, and a fallback's reason. Errors: `ValueError` for an unknown name, or "triton" in vain."""
    if implementation not in (AUTO, *IMPLEMENTATIONS):
        known = ", ".join((AUTO, *IMPLEMENTATIONS))
        raise ValueError(f"{op}: implementation is {implementation!r}; pass one of {known}")
    device = routing.order.device.type
    if implementation == REFERENCE or (implementation == AUTO and device != "cuda"):
        return REFERENCE, ""
    unfit = _triton_unfit(device, dtype)
    if unfit is None:
        return TRITON, ""
    if implementation == TRITON:
        raise ValueError(f"{op}: implementation='triton' cannot take {unfit[1]}; pass implementation='reference'")
    return REFERENCE, unfit[0]


def _triton_unfit(device: str, dtype: torch.dtype) -> tuple[str, str] | None:
    """(a fallback's reason, what the Triton kernels cannot take), or None."""
    if device != "cuda" and not (device == "cpu" and interpreting()):
        return "device", f"tensors on {device}: it needs a CUDA device"
    if dtype == torch.float64:
        return "dtype", f"{dtype}: it takes up to four bytes an element"
    return None
