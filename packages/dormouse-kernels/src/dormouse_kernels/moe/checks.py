"""What an expert pass refuses, each with one sentence: the op, the argument, what it got, the mend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from dormouse_kernels.moe.routing import Routing

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_shape(op: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...], meaning: str) -> None:
    """`ValueError` unless `tensor` has `shape`, which `meaning` spells in letters."""
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{op}: {name} has shape {list(tensor.shape)}, expected {meaning} = {list(shape)}; "
            f"pass {name} in that layout"
        )


def check_floats(op: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """`TypeError` for a dtype that is no float, `ValueError` for a tensor elsewhere than the first one."""
    first, device = next((name, tensor.device) for name, tensor in tensors.items())
    for name, tensor in tensors.items():
        if tensor.dtype not in _FLOATS:
            raise TypeError(f"{op}: {name} is {tensor.dtype}; pass float64, float32, bfloat16 or float16")
        if tensor.device != device:
            raise ValueError(f"{op}: {name} is on {tensor.device} but {first} is on {device}; move one of them")


def check_bank(op: str, name: str, bank: torch.Tensor, layout: str) -> None:
    """`ValueError` unless `bank` is three-dimensional, non-empty and contiguous along its last dimension."""
    if bank.dim() != 3:
        raise ValueError(f"{op}: {name} has shape {list(bank.shape)}; pass {layout}")
    if 0 in bank.shape:
        raise ValueError(f"{op}: {name} has shape {list(bank.shape)}, which has an empty dimension; pass {layout}")
    if bank.stride(2) != 1 and bank.shape[2] > 1:
        # a copy of a bank is a full pass over the weights: never made silently
        raise ValueError(
            f"{op}: {name} has strides {bank.stride()}, but its last dimension must be contiguous; "
            f"pass {name}.contiguous()"
        )


def check_hidden(op: str, hidden_states: torch.Tensor) -> None:
    """`ValueError` unless `hidden_states` is [T, d]."""
    if hidden_states.dim() != 2:
        raise ValueError(f"{op}: hidden_states has shape {list(hidden_states.shape)}; flatten it to [T, d]")


def check_routing(
    op: str,
    num_experts: int,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    routing: Routing | None,
) -> None:
    """Refuses indices, weights or a `Routing` that do not belong to these tokens and experts."""
    if top_k_index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: top_k_index is {top_k_index.dtype}; pass int32 or int64 indices")
    if top_k_index.dim() != 2 or top_k_index.shape[0] != hidden_states.shape[0]:
        raise ValueError(
            f"{op}: top_k_index has shape {list(top_k_index.shape)} for {hidden_states.shape[0]} tokens; "
            "pass [T, k], a row a token of hidden_states"
        )
    if top_k_index.device != hidden_states.device:
        raise ValueError(
            f"{op}: top_k_index is on {top_k_index.device} but hidden_states is on {hidden_states.device}; "
            "move one of them"
        )
    check_shape(op, "top_k_weights", top_k_weights, tuple(top_k_index.shape), "[T, k]")
    if routing is None:
        return
    if routing.num_experts != num_experts:
        raise ValueError(
            f"{op}: routing was made for {routing.num_experts} experts but the banks hold {num_experts}; "
            f"pass route(top_k_index, {num_experts})"
        )
    if routing.top_k_index.shape != top_k_index.shape or routing.order.device != top_k_index.device:
        raise ValueError(
            f"{op}: routing was made from top_k_index {list(routing.top_k_index.shape)} on {routing.order.device}, "
            f"got {list(top_k_index.shape)} on {top_k_index.device}; pass route(top_k_index, {num_experts})"
        )


def check_capacity(op: str, capacity: int | None) -> None:
    """`ValueError` for a capacity below one."""
    if capacity is not None and capacity < 1:
        raise ValueError(f"{op}: capacity is {capacity}; pass at least 1, or None to drop nothing")


def check_indices_in_range(op: str, routing: Routing) -> None:
    """`ValueError` if any index lies outside the experts. Reads the device: a host sync."""
    bad = int(routing.bad_indices())
    if bad:
        raise ValueError(
            f"{op}: top_k_index holds {bad} indices outside 0..{routing.num_experts - 1}; "
            "mend them, or pass check_indices=False to give their slots zeros"
        )


_LEAST = {"stages": 1, "splits": 1, "programs": 1, "group": 1, "persistent": 0}
"""The least of the tile sizes that may be any number, by the ending of their names; all others are powers of two."""


def check_tiles(op: str, tiles: Any, kind: type, within: str = "tiles") -> None:
    """`TypeError` unless `tiles` is of `kind`; `ValueError` for a size that no kernel could be built with."""
    if not isinstance(tiles, kind):
        raise TypeError(
            f"{op}: tiles is {type(tiles).__name__}; pass what dormouse_kernels.tiles holds for {op}, or None"
        )
    for field in fields(tiles):
        name, size = f"{within}.{field.name}", getattr(tiles, field.name)
        if is_dataclass(size):
            check_tiles(op, size, type(size), name)
        elif field.name.endswith("pieces") and size not in (1, 2):
            raise ValueError(f"{op}: {name} is {size}; pass 1 or 2")
        elif not isinstance(size, bool):
            least = next((least for ending, least in _LEAST.items() if field.name.endswith(ending)), None)
            if least is None and (size < 1 or size & (size - 1)):
                raise ValueError(f"{op}: {name} is {size}; pass a power of two")
            if least is not None and size < least:
                raise ValueError(f"{op}: {name} is {size}; pass at least {least}")
