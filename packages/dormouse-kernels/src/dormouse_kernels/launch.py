"""Launching a Triton kernel on tensors, with what Triton does not refuse refused first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def interpreting() -> bool:
    """Whether Triton interprets kernels on the CPU: `TRITON_INTERPRET=1`, set before a kernel is decorated."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def dependent_launches(device: torch.device) -> bool:
    """Whether kernels on a device can be programmatic dependent launches: from compute capability 9.0 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch(
    kernel: Any,
    grid: tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]],
    arguments: Mapping[str, Any],
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    pdl: bool = False,
) -> None:
    """`kernel[grid](**arguments)`, but never on bfloat16 tensors in the interpreter.

    `pdl`: as a programmatic dependent launch, for a kernel that begins with `dependents.after_previous`.

    The interpreter computes on bf16 bit patterns: a dot product is off by 1e10 and nothing is raised (3.6.0 and
    3.7.1). Errors: `TypeError`, naming the argument.
    """
    # not interpreting(): reading a knob takes 3 us, and a launch in all about 25 (one H200's host)
    if type(kernel).__name__ == "InterpretedFunction":
        _refuse_bfloat16(kernel, arguments)
    with _on_the_device_of(arguments):
        kernel[grid](**arguments, num_warps=num_warps, num_stages=num_stages, launch_pdl=pdl)


def _on_the_device_of(arguments: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Triton launches on the current device, torch's own operations on their tensors'."""
    device = next((value.device for value in arguments.values() if isinstance(value, torch.Tensor)), None)
    if device is None or device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def _refuse_bfloat16(kernel: Any, arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
            raise TypeError(
                f"{kernel.fn.__name__}: {name} is bfloat16, which Triton's interpreter computes wrong and silently; "
                "pass float32 or float16, or run on a GPU without TRITON_INTERPRET"
            )


def check_dot(kernel: str, *, m: int, n: int, k: int, itemsize: int) -> None:
    """`ValueError` unless tiles [m, k] · [k, n] of that itemsize can be a `tl.dot` on a GPU.

    Sides are powers of two, and k is at least 16 (32 for one-byte operands). The interpreter takes any, the compiler
    refuses with a message about its own types.
    """
    least = 32 if itemsize == 1 else 16
    if k < least:
        raise ValueError(
            f"{kernel}: a tl.dot contracts {k} columns a tile, and {itemsize}-byte operands need {least}; "
            f"pad the contracted dimension to {least}"
        )
    for name, side in (("m", m), ("n", n), ("k", k)):
        if side < 1 or side & (side - 1):
            raise ValueError(f"{kernel}: tile side {name} is {side}; pass a power of two")
