"""The work that tiles are tuned for: sizes, random arguments on a device, and the launches without one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from dormouse_kernels.aot import Build, Pointer
from dormouse_kernels.moe.op import glu_experts, latent_glu_experts
from dormouse_kernels.moe.passes import Operands, Tiles, make_pass
from dormouse_kernels.moe.routing import Routing, route


@dataclass(frozen=True)
class Problem:
    """One call of an op. For `glu_experts` r is the inner width and f is d."""

    op: str
    T: int
    d: int
    r: int
    f: int
    experts: int
    k: int
    dtype: torch.dtype

    @property
    def latent(self) -> bool:
        """Whether the op is `latent_glu_experts`."""
        return self.op == "latent_glu_experts"

    def __str__(self) -> str:
        sizes = f"T {self.T} d {self.d} r {self.r} f {self.f} E {self.experts} k {self.k}"
        return f"{self.op}, {sizes}, {str(self.dtype).removeprefix('torch.')}"

    def operands(self, make: Callable[..., torch.Tensor]) -> Operands:
        """The tensors of a call, `make(*shape)` each, the scale's and the weights' fp32 apart."""
        rank, scale = self.r, None
        if self.latent:
            scale = make(self.experts, 2 * rank).float()
        return Operands(
            make(self.T, self.d), make(self.experts, 2 * rank, self.d), scale,
            make(self.experts, self.f if self.latent else self.d, rank), make(self.T, self.k).float(), None,
        )  # fmt: skip


def builds(problem: Problem, tiles: Tiles, arch: int) -> list[Build]:
    """The launches of a forward and a full backward with these tiles, as they would be compiled for a card."""
    from dormouse_kernels.moe.grouped import launches as grouped
    from dormouse_kernels.moe.latent import launches as latent

    found: list[Build] = []

    def keep(
        kernel: Any, grid: Any, arguments: dict[str, Any], *, num_warps: int = 4, num_stages: int = 3, pdl: bool = False
    ) -> None:
        named = {n: Pointer(a.dtype) if isinstance(a, torch.Tensor) else a for n, a in arguments.items()}
        if "INTERPRETED" in named:
            named["INTERPRETED"] = False
        found.append(Build(kernel, named, arch, num_warps, num_stages))

    def meta(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=problem.dtype, device="meta")

    routing = _meta_routing(problem)
    operands = problem.operands(meta)
    width = -(-problem.f // 16) * 16 if problem.latent else problem.d
    with ExitStack() as stack:
        # what launches asks a module for `launch` by name: here it answers with the arguments alone
        for module in (latent, grouped):
            stack.enter_context(patch.object(module, "launch", keep))
        work = make_pass("triton", operands, routing, None, width, tiles=tiles)
        out, saved = work.forward(operands)
        work.backward(operands, saved, torch.empty_like(out), (True,) * 6)
    return found


def _meta_routing(problem: Problem) -> Routing:
    index = torch.empty(problem.T, problem.k, dtype=torch.int64, device="meta")
    return route(index, problem.experts, implementation="reference")


def call(problem: Problem, device: torch.device) -> Callable[[Tiles], list[torch.Tensor]]:
    """A function of tiles that runs forward and backward on fixed random arguments: the result and every gradient."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)
        return (drawn * shape[-1] ** (-0.5 if len(shape) == 3 else 0)).to(problem.dtype)

    operands = problem.operands(draw)
    leaves = [leaf.requires_grad_() for leaf in operands if leaf is not None]
    x, gate_up, scale, down, weights, _ = operands
    scores = torch.rand(problem.T, problem.experts, generator=generator, device=device)
    index = scores.topk(problem.k).indices

    def run(tiles: Tiles) -> list[torch.Tensor]:
        options: dict[str, Any] = {"implementation": "triton", "tiles": tiles}
        if scale is not None:
            out = latent_glu_experts(x, gate_up, scale, down, index, weights, **options)
        else:
            out = glu_experts(x, gate_up, down, index, weights, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    return run
