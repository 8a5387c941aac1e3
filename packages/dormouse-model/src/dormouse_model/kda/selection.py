"""Which implementation of the delta rule runs, and why: one pure function and a closed list of reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

Implementation = Literal["fla", "bounded", "chunk", "recurrent"]
Requested = Literal["auto", "fla", "torch", "recurrent"]
"""What a caller may ask for; `torch` is `bounded` where the decays are and `chunk` elsewhere."""
Reason = Literal[
    "supported",
    "cpu_device",
    "one_byte",
    "forced",
    "fla_missing",
    "fla_version",
    "dtype",
    "head_dim",
    "grid_limit",
    "int32_offsets",
]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)
REASONS: tuple[str, ...] = get_args(Reason)

FLA_VERSIONS = ("0.5.2", "0.7")
"""The first version that is right here and the first that has not been tried."""

_MENDS: dict[str, str] = {
    "fla_missing": "install fla-core",
    "fla_version": f"install a fla-core from {FLA_VERSIONS[0]} to below {FLA_VERSIONS[1]}",
    "dtype": "run it under torch.autocast in bf16",
    "head_dim": "choose a head_dim from 16 to 256",
    "grid_limit": "lower the batch",
    "int32_offsets": "lower the batch or the length",
}

LOWEST = -5.0
"""The lowest log decay of a byte for which `bounded` holds; at -5.9 its masked scores overflow."""
MAX_HEAD_DIM = 256
MIN_HEAD_DIM = 16
MAX_GRID = 65_535
MAX_ELEMENTS = 2**31 - 1


@dataclass(frozen=True)
class Choice:
    """What runs, why, and whether it stands in for something faster."""

    implementation: Implementation
    reason: Reason

    @property
    def is_fallback(self) -> bool:
        """True where a CUDA device runs plain torch because flash-linear-attention cannot serve."""
        return self.implementation in ("bounded", "chunk") and self.reason not in ("supported", "cpu_device", "forced")


def choose(
    *,
    device_type: str,
    dtype: torch.dtype,
    batch: int,
    length: int,
    heads: int,
    head_dim: int,
    needs_grad: bool,
    lower_bound: float | None,
    fla_version: str | None,
    requested: Requested = "auto",
) -> Choice:
    """The implementation for one call; pure, so that it can be asked without running anything.

    `lower_bound` is the lowest log decay of a byte, None where nothing bounds it; `fla_version` the installed version
    of fla-core or None. Errors: `ValueError` for an unknown `requested`, or for an `"fla"` that cannot serve.
    """
    plain: Implementation = "bounded" if lower_bound is not None and lower_bound >= LOWEST else "chunk"
    if requested in ("torch", "recurrent"):
        return Choice("recurrent" if requested == "recurrent" else plain, "forced")
    if requested not in ("auto", "fla"):
        raise ValueError(f"kda: implementation '{requested}' does not exist; choose auto, fla, torch or recurrent")
    obstacle = _obstacle(device_type, dtype, batch, length, heads, head_dim, fla_version)
    if requested == "fla":
        if obstacle is not None:
            raise ValueError(
                f'kda: implementation "fla" cannot serve this call ({obstacle}); pass implementation="auto"'
            )
        return Choice("fla", "forced")
    if length == 1 and not needs_grad:
        return Choice("recurrent", "one_byte")
    if obstacle is not None:
        return Choice(plain, obstacle)
    return Choice("fla", "supported")


class FallbackRefused(RuntimeError):
    """A CUDA device would have run plain torch, which nobody allowed; one sentence with the reason and the mend."""


def refuse_fallback(choice: Choice, allowed: bool) -> None:
    """Raises `FallbackRefused` with the reason and its mend where `choice` is a fallback that is not `allowed`."""
    if choice.is_fallback and not allowed:
        raise FallbackRefused(
            f"kda: flash-linear-attention cannot serve this call on CUDA ({choice.reason}) and plain torch is far "
            f"slower; {_MENDS[choice.reason]}, or set kda.allow_fallback = true"
        )


def _obstacle(
    device_type: str, dtype: torch.dtype, batch: int, length: int, heads: int, head_dim: int, fla_version: str | None
) -> Reason | None:
    """Why flash-linear-attention cannot serve, or None. The limits are those of fla-core 0.5.2's kernels."""
    if device_type != "cuda":
        return "cpu_device"
    if fla_version is None:
        return "fla_missing"
    if not _served(fla_version):
        return "fla_version"
    if dtype not in (torch.bfloat16, torch.float16):
        return "dtype"  # fp32 inputs would go through TF32 products without a word
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        return "head_dim"
    if batch * heads > MAX_GRID:
        return "grid_limit"  # one axis of the grid
    if batch * length * heads * head_dim > MAX_ELEMENTS:
        return "int32_offsets"  # fla #1080: silent corruption past it
    return None


def _served(version: str) -> bool:
    from packaging.version import Version

    return Version(FLA_VERSIONS[0]) <= Version(version) < Version(FLA_VERSIONS[1])
