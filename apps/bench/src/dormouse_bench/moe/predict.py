"""Predicted milliseconds of the latent expert pass on a card that need not be here.

A launch takes the longer of moving its bytes and computing, stretched by half of its last wave's idle share, and
`LAUNCH_MS` besides. How many blocks a multiprocessor holds is read off the compiled kernel. No rate is fitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from dormouse_kernels.aot import Build, Compiled, Pointer, compile_kernels
from dormouse_kernels.moe.latent import launches
from dormouse_kernels.moe.latent.plan import plan_for
from dormouse_kernels.moe.latent.tiles import Tiles, tiles_for
from dormouse_kernels.moe.routing import sort

from dormouse_bench.moe import problem
from dormouse_bench.moe.cards import Card
from dormouse_bench.moe.costs import Cost, Rates
from dormouse_bench.moe.shapes import Shape
from dormouse_bench.moe.traffic import TILED, Loads, loads, traffic

LAUNCH_MS = 0.006
"""What the two smallest kernels of the pass took on an H200, which move less than a megabyte: 6.1 and 6.5 µs."""


@dataclass(frozen=True)
class Launch:
    """One launch of the pass as it would be made: kernel, arguments with `Pointer`s for tensors, programs."""

    kernel: Any
    arguments: Mapping[str, Any]
    programs: int
    num_warps: int
    num_stages: int
    phase: str

    @property
    def name(self) -> str:
        """The kernel's own."""
        return self.kernel.fn.__name__


@dataclass(frozen=True)
class Predicted:
    """One launch on one card."""

    launch: Launch
    compiled: Compiled
    cost: Cost
    resident: int
    """Blocks a multiprocessor."""
    waves: float
    """Programs with work, by those that run at once."""
    ms: float


def predict(shape: Shape, card: Card, rates: Rates) -> list[Predicted]:
    """Every launch of a forward and a backward at those rates. Errors: `ValueError` for another kind of pass."""
    if not predictable(shape):
        raise ValueError(f"predict: {shape} is not a routed latent pass of known routing; pass b1 or b1-zipf")
    tiles = tiles_for((card.arch // 10, card.arch % 10), 2, shape.r)
    index = problem.indices(shape, "cpu")
    routing = loads(index.flatten().bincount(minlength=shape.experts), tiles.rows)
    made = record(shape, tiles)
    builds = [Build(each.kernel, each.arguments, card.arch, each.num_warps, each.num_stages) for each in made]
    compiled = zip(made, compile_kernels(builds), strict=True)
    return [_predicted(each, one, shape, card, rates, routing, tiles) for each, one in compiled]


def predictable(shape: Shape) -> bool:
    """Whether this model knows the shape's launches: the latent pass alone, its routing known without a file."""
    return shape.op == "latent_glu_experts" and not shape.shared_rank and shape.routing != "trained"


def total_ms(launched: Sequence[Predicted], phase: str) -> float:
    """Of "fwd", "bwd" or "fwd+bwd"."""
    return sum(each.ms for each in launched if each.launch.phase in phase.split("+"))


def _predicted(
    launch: Launch, compiled: Compiled, shape: Shape, card: Card, rates: Rates, routing: Loads, tiles: Tiles
) -> Predicted:
    turns, width = tiles.turns and shape.k <= 2, launch.arguments.get("WIDTH", 0)
    cost = traffic(launch.name, shape, routing, tile_rows=tiles.rows, turns=turns, width=width)
    resident = card.resident(registers=compiled.registers, shared=compiled.shared, num_warps=launch.num_warps)
    working = launch.programs
    if launch.name in TILED:
        working = launch.programs * routing.tiles / (shape.experts + 1 + -(-shape.rows // tiles.rows))
    waves = max(working / (card.multiprocessors * resident), 1e-9)
    tail = 1 + (-(-waves // 1) - waves) / waves / 2 if waves > 1 else 1.0
    return Predicted(launch, compiled, cost, resident, waves, LAUNCH_MS + cost.floor_ms(rates) * tail)


def record(shape: Shape, tiles: Tiles) -> list[Launch]:
    """The launches of a forward and a full backward over meta tensors, in order; nothing runs."""
    made: list[Launch] = []
    phase = "fwd"
    on_card = {"INTERPRETED": False, "PDL": tiles.pdl}

    def keep(
        kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], *, num_warps=4, num_stages=3, pdl=False
    ) -> None:
        named = {n: Pointer(a.dtype) if isinstance(a, torch.Tensor) else a for n, a in arguments.items()}
        # what the card would be launched with, where this machine would say otherwise
        named |= {name: value for name, value in on_card.items() if name in named}
        programs = 1
        for side in grid:
            programs *= side
        made.append(Launch(kernel, named, programs, num_warps, num_stages, phase))

    def meta(*sizes: int, of: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*sizes, dtype=of, device="meta")

    experts, r = shape.experts, shape.r
    x, gate_up, v = meta(shape.tokens, shape.d), meta(experts, 2 * r, shape.d), meta(experts, shape.f, r)
    scale, weights = meta(experts, 2 * r, of=torch.float32), meta(shape.tokens, shape.k, of=torch.float32)
    with patch.object(launches, "launch", keep), patch.object(sort, "launch", keep):
        index = meta(shape.tokens, shape.k, of=torch.int64)
        rows = plan_for(sort.sort_slots(index, experts, tiles.rows), tiles)
        out, saved = launches.run_forward(x, gate_up, scale, v, weights, None, rows, x.dtype)
        phase = "bwd"
        _, stash = launches.grad_v(out, saved, scale, v, weights, rows, data=True, dv=torch.empty_like(v))
        du, dscale = torch.empty_like(gate_up), torch.empty_like(scale)
        launches.grad_u(x, stash, gate_up, rows, data=True, du=du, dscale=dscale)
    return made
