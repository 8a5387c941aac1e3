"""The grouped products as `torch.library` ops, which `torch.compile` keeps whole in its graph.

Eager calls do not come through here, as in moe/library.py. A routing travels as the list of its tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dormouse_kernels.moe.counting import count
from dormouse_kernels.moe.grouped.products import Products, fresh_bank
from dormouse_kernels.moe.library import pack, tile_rows, unpack


def call(op: str, products: Products, left: Tensor, right: Tensor, reason: str) -> Tensor:
    """`grouped_mm` or `grouped_wgrad`, by name, as one node of a graph."""
    routing = products.routing
    registered = mm if op == "grouped_mm" else wgrad
    return registered(
        left, right, routing.top_k_index, pack(routing), tile_rows(routing), products.gather, products.scatter,
        products.implementation, reason,
    )  # fmt: skip


def call_into(products: Products, a: Tensor, g: Tensor, out: Tensor, accumulate: bool, reason: str) -> None:
    """`grouped_wgrad` with `out`, as one node of a graph."""
    routing = products.routing
    wgrad_into(
        a, g, out, routing.top_k_index, pack(routing), tile_rows(routing), products.gather, products.scatter,
        accumulate, products.implementation, reason,
    )  # fmt: skip


@torch.library.custom_op("dormouse::grouped_mm", mutates_args=())
def mm(
    a: Tensor, b: Tensor, top_k_index: Tensor, routing: list[Tensor], rows: int, gather: bool, scatter: bool,
    implementation: str, reason: str,
) -> Tensor:  # fmt: skip
    """`Products.multiply`, counted."""
    products = _products(a, b, top_k_index, routing, rows, gather, scatter, implementation)
    count("grouped_mm", implementation, products.routing, None, reason)
    return products.multiply(a, b)


@mm.register_fake
def _(
    a: Tensor, b: Tensor, top_k_index: Tensor, routing: list[Tensor], rows: int, gather: bool, scatter: bool,
    implementation: str, reason: str,
) -> Tensor:  # fmt: skip
    return a.new_empty(top_k_index.numel(), b.shape[2], dtype=torch.promote_types(a.dtype, b.dtype))


@torch.library.custom_op("dormouse::grouped_wgrad", mutates_args=())
def wgrad(
    a: Tensor, g: Tensor, top_k_index: Tensor, routing: list[Tensor], rows: int, gather: bool, scatter: bool,
    implementation: str, reason: str,
) -> Tensor:  # fmt: skip
    """`Products.weight_gradient` into fresh memory, counted."""
    products = _products(a, g, top_k_index, routing, rows, gather, scatter, implementation)
    count("grouped_wgrad", implementation, products.routing, None, reason)
    return products.weight_gradient(a, g, fresh_bank(products.routing, a, g, products.dtype))


@wgrad.register_fake
def _(
    a: Tensor, g: Tensor, top_k_index: Tensor, routing: list[Tensor], rows: int, gather: bool, scatter: bool,
    implementation: str, reason: str,
) -> Tensor:  # fmt: skip
    return a.new_empty(routing[0].numel(), a.shape[1], g.shape[1], dtype=torch.promote_types(a.dtype, g.dtype))


@torch.library.custom_op("dormouse::grouped_wgrad_into", mutates_args=("out",))
def wgrad_into(
    a: Tensor, g: Tensor, out: Tensor, top_k_index: Tensor, routing: list[Tensor], rows: int, gather: bool,
    scatter: bool, accumulate: bool, implementation: str, reason: str,
) -> None:  # fmt: skip
    """`Products.weight_gradient` into `out`, counted; not differentiable."""
    products = _products(a, g, top_k_index, routing, rows, gather, scatter, implementation)
    count("grouped_wgrad", implementation, products.routing, None, reason)
    products.weight_gradient(a, g, out, accumulate=accumulate)


@wgrad_into.register_fake
def _(
    a: Tensor, g: Tensor, out: Tensor, top_k_index: Tensor, routing: list[Tensor], rows: int, gather: bool,
    scatter: bool, accumulate: bool, implementation: str, reason: str,
) -> None:  # fmt: skip
    return None


@torch.library.custom_op("dormouse::grouped_backward", mutates_args=())
def backward(
    grad: Tensor, left: Tensor, right: Tensor, top_k_index: Tensor, routing: list[Tensor], rows: int, gather: bool,
    scatter: bool, implementation: str, of_wgrad: bool, wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    """The wanted gradients of `mm`'s a and b, or of `wgrad`'s a and g."""
    products = _products(left, right, top_k_index, routing, rows, gather, scatter, implementation)
    made = []
    if wanted[0]:
        operands = (right, grad) if of_wgrad else (grad, right)
        made.append(products.data_gradient(*operands, left.dtype))
    if wanted[1]:
        if of_wgrad:
            made.append(products.multiply(left, grad).to(right.dtype))
        else:
            made.append(products.weight_gradient(left, grad, torch.empty_like(right)))
    return made


@backward.register_fake
def _(
    grad: Tensor, left: Tensor, right: Tensor, top_k_index: Tensor, routing: list[Tensor], rows: int, gather: bool,
    scatter: bool, implementation: str, of_wgrad: bool, wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    # all are fresh and contiguous but b's, which has b's strides
    alike = left.new_empty(left.shape), right.new_empty(right.shape) if of_wgrad else torch.empty_like(right)
    return [tensor for tensor, want in zip(alike, wanted, strict=True) if want]


def _products(
    left: Tensor, right: Tensor, top_k_index: Tensor, routing: list[Tensor], rows: int, gather: bool, scatter: bool,
    implementation: str,
) -> Products:  # fmt: skip
    dtype = torch.promote_types(left.dtype, right.dtype)
    return Products(unpack(top_k_index, routing, rows), gather, scatter, dtype, implementation)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    left, right, index, routing, rows, gather, scatter, implementation, _ = inputs
    ctx.save_for_backward(left, right, index, *routing)
    ctx.constants = rows, gather, scatter, implementation


def _gradients(ctx: Any, grad: Tensor, *, of_wgrad: bool) -> tuple[Any, ...]:
    left, right, index, *routing = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:2])
    made = iter(backward(grad, left, right, index, routing, *ctx.constants, of_wgrad, wanted))
    grads = [next(made) if want else None for want in wanted]
    return *grads, None, [None] * len(routing), None, None, None, None, None


def _mm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _gradients(ctx, grad, of_wgrad=False)


def _wgrad_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _gradients(ctx, grad, of_wgrad=True)


mm.register_autograd(_mm_backward, setup_context=_setup)
wgrad.register_autograd(_wgrad_backward, setup_context=_setup)
