"""The ladder: rungs by name, each a storage format of a factor with an exact number of bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch
from dormouse_kernels.muon import split_master

LADDER: tuple[str, ...] = ("none", "fp8", "nvfp4", "int4", "ternary", "sign")
"""Every rung's name, from the most bytes to the fewest."""


class Rung(Protocol):
    """A storage format: fp32 master -> pack -> the bf16 bank that compute reads."""

    name: str

    def quantize(self, master: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """fp32 master [...] -> its pack, tensors by name."""
        ...

    def dequantize(self, pack: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A pack -> the bank [...] bfloat16."""
        ...

    def nbytes(self, shape: Sequence[int]) -> int:
        """Exact bytes of the pack of a master of `shape`, without making one."""
        ...


class HighHalf:
    """`none`: the bf16 high half of the split master, 2 bytes a parameter; pack and bank are the same bits."""

    name = "none"

    def quantize(self, master: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """fp32 master [...] -> {"high": [...] bfloat16}, rounded to nearest, ties away from zero.

        Errors: `TypeError` for another dtype. Source: `dormouse_kernels.muon.split_master`.
        """
        return {"high": split_master(master)[0]}

    def dequantize(self, pack: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """{"high": [...] bfloat16} -> that tensor itself, no copy.

        Errors: `ValueError` for a pack without it or with more; `TypeError` for another dtype.
        """
        if set(pack) != {"high"}:
            raise ValueError(f"dequantize: the pack holds {sorted(pack)}; rung 'none' packs only 'high'")
        high = pack["high"]
        if high.dtype != torch.bfloat16:
            raise TypeError(f"dequantize: 'high' is {high.dtype}; pass the bfloat16 half")
        return high

    def nbytes(self, shape: Sequence[int]) -> int:
        """2 · the number of parameters."""
        return 2 * math.prod(shape)


_BUILT: Mapping[str, Rung] = MappingProxyType({"none": HighHalf()})


def rung(name: str) -> Rung:
    """The rung of that name. Errors: `ValueError` for a name off the ladder or a rung not built, with the list."""
    if name not in LADDER:
        raise ValueError(f"rung: there is no {name!r} on the ladder; pass one of {', '.join(LADDER)}")
    if name not in _BUILT:
        raise ValueError(f"rung: {name!r} is on the ladder but not built; pass one of {', '.join(_BUILT)}")
    return _BUILT[name]
