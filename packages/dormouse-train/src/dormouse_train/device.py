"""Which device a run is on."""

from __future__ import annotations

from dormouse_train.errors import UserError


def settled(wanted: str) -> str:
    """`wanted` itself, or what `auto` means on this machine: CUDA where there is a device.

    Imports torch unless `wanted` is `cpu`. Errors: `UserError` for CUDA where torch finds no device.
    """
    if wanted == "cpu":
        return wanted
    import torch

    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UserError(f"--device: torch {torch.__version__} finds no CUDA device here; start a run with --device cpu")
    return "cuda" if available else "cpu"
