"""Every launch of a latent expert pass as arguments by name, without running one: what the compiler tests build."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from dormouse_kernels.aot import Build, Pointer
from dormouse_kernels.moe.latent import launches
from dormouse_kernels.moe.latent.plan import plan_for
from dormouse_kernels.moe.latent.tiles import Tiles
from dormouse_kernels.moe.routing import sort


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel, its arguments with `Pointer`s for tensors, warps and stages."""

    kernel: Any
    arguments: Mapping[str, Any]
    num_warps: int
    num_stages: int

    def build(self, arch: int) -> Build:
        """The same, compiled for a card."""
        return Build(self.kernel, self.arguments, arch, self.num_warps, self.num_stages)


def record(
    monkeypatch: Any,
    tiles: Tiles,
    T: int,
    d: int,
    r: int,
    f: int,
    E: int,
    k: int,
    *,
    dtype: torch.dtype,
    residual: bool,
) -> list[Launch]:
    """The launches of a forward and a full backward over meta tensors, in order."""
    recorded: list[Launch] = []

    def keep(kernel, grid, arguments, *, num_warps=4, num_stages=3, pdl=False):
        named = {n: Pointer(a.dtype) if isinstance(a, torch.Tensor) else a for n, a in arguments.items()}
        if "INTERPRETED" in named:
            named["INTERPRETED"] = False
        named["PDL"] = tiles.pdl
        recorded.append(Launch(kernel, named, num_warps, num_stages))

    monkeypatch.setattr(launches, "launch", keep)
    monkeypatch.setattr(sort, "launch", keep)

    def meta(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=of, device="meta")

    f_pad = -(-f // 16) * 16
    x, gate_up, v = meta(T, d), meta(E, 2 * r, d), meta(E, f, r)
    scale, weights = meta(E, 2 * r, of=torch.float32), meta(T, k, of=torch.float32)
    made = plan_for(sort.sort_slots(meta(T, k, of=torch.int64), E, tiles.rows), tiles)
    sort.cut_tiles(made.routing.offsets, T * k, 128)
    rest = meta(T, f_pad) if residual else None
    out, saved = launches.run_forward(x, gate_up, scale, v, weights, rest, made, dtype)
    _, stash = launches.grad_v(out, saved, scale, v, weights, made, data=True, dv=torch.empty_like(v))
    du, dscale = torch.empty_like(gate_up), torch.empty_like(scale)
    launches.grad_u(x, stash, gate_up, made, data=True, du=du, dscale=dscale)
    return recorded
