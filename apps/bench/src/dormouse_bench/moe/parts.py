"""Parts of an expert pass with rows of their own: sorting the rows by expert, and adding up each token's rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from dormouse_kernels import route

from dormouse_bench import timing
from dormouse_bench.agreement import ROUNDING, farthest
from dormouse_bench.moe.arms import OURS, Absent, reason
from dormouse_bench.moe.measure import Measured
from dormouse_bench.moe.problem import Problem


@dataclass(frozen=True)
class Part:
    """One implementation of a part, and what it makes: compared before it is timed."""

    phase: str
    implementation: str
    work: Callable[[], tuple[torch.Tensor, ...]]


def measure(problem: Problem, *, device: str, budget_ms: int) -> tuple[list[Measured], list[Absent]]:
    """Rows of "route" and "combine": eager torch, the same compiled by torch, and ours."""
    found: list[Measured] = []
    absent: list[Absent] = []
    for make in (_route_parts, _combine_parts):
        eager, *others = make(problem, device)
        want = eager.work()
        for part in (eager, *others):
            try:
                found.append(_one(part, want, device, budget_ms))
            except Exception as error:  # a compiler raises many kinds
                absent.append(Absent(f"{part.phase} {part.implementation}", reason(error)))
    return found, absent


def _one(part: Part, want: tuple[torch.Tensor, ...], device: str, budget_ms: int) -> Measured:
    got = part.work()
    far = farthest(got, want)
    allowed = max(ROUNDING.get(each.dtype, 0.0) for each in want)
    wrong = "" if far <= allowed else f"its values are {far:.1e} away from eager torch's"
    syncs = timing.host_syncs(part.work, device)
    ms = timing.median_ms(part.work, device, budget_ms)
    extra = timing.peak_extra_bytes(part.work, device)
    return Measured(part.phase, part.implementation, ms, extra, syncs, 0.0, far, wrong)


def _route_parts(problem: Problem, device: str) -> list[Part]:
    index, experts = problem.top_k_index, problem.shape.experts

    def work(implementation: str) -> Callable[[], tuple[torch.Tensor, ...]]:
        def sort() -> tuple[torch.Tensor, ...]:
            made = route(index, experts, implementation=implementation)
            return made.offsets, made.order, made.inverse

        return sort

    parts = [Part("route", "torch", work("reference"))]
    if device == "cuda":
        parts.append(Part("route", "torch-compiled", torch.compile(work("reference"))))
        parts.append(Part("route", OURS, work(OURS)))
    return parts


def _combine_parts(problem: Problem, device: str) -> list[Part]:
    shape = problem.shape
    rows = problem.hidden_states.detach().new_empty(shape.rows, shape.f_pad).normal_()

    def eager() -> tuple[torch.Tensor, ...]:
        return (rows.view(shape.tokens, shape.k, -1).sum(1),)

    parts = [Part("combine", "torch", eager)]
    if device != "cuda":
        return parts

    from dormouse_kernels.launch import dependent_launches
    from dormouse_kernels.moe.latent.launches import sum_slots

    pdl = dependent_launches(rows.device)

    def ours() -> tuple[torch.Tensor, ...]:
        made = rows.new_empty(shape.tokens, shape.f_pad)
        sum_slots(rows, None, made, shape.k, shape.f_pad, pdl=pdl)
        return (made,)

    return [*parts, Part("combine", "torch-compiled", torch.compile(eager)), Part("combine", OURS, ours)]
