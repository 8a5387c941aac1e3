"""Every implementation of an expert pass that is measured: ours through the public op, peers through theirs.

An arm maps a `Problem` (and a residual [T, width], or None) to [T, width], differentiably, routing included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from dormouse_kernels import glu_experts, latent_glu_experts

from dormouse_bench.moe import peers
from dormouse_bench.moe.problem import Problem
from dormouse_bench.moe.shapes import Shape

Experts = Callable[[Problem, torch.Tensor | None], torch.Tensor]
OURS = "triton"


@dataclass(frozen=True)
class Arm:
    """One implementation. `experts` returns h [T, f_pad] when it pads, [T, f] otherwise."""

    name: str
    experts: Experts
    capacity: int | None = None
    """Rows an expert beyond which rows are dropped; None drops nothing."""
    pads: bool = True


@dataclass(frozen=True)
class Absent:
    """An arm that could not be measured, and why."""

    name: str
    reason: str


def reason(error: Exception) -> str:
    """The first line of what an arm raised, with its kind where that says more than the words."""
    words = str(error).strip().splitlines()
    return words[0] if words else type(error).__name__


def op(implementation: str, capacity: int | None = None) -> Experts:
    """The public op of the problem's shape with that implementation."""

    def experts(problem: Problem, residual: torch.Tensor | None) -> torch.Tensor:
        if problem.scale is None:
            return glu_experts(
                problem.hidden_states, problem.gate_up_proj, problem.down, problem.top_k_index, problem.top_k_weights,
                capacity=capacity, implementation=implementation,
            )  # fmt: skip
        return latent_glu_experts(
            problem.hidden_states, problem.gate_up_proj, problem.scale, problem.down, problem.top_k_index,
            problem.top_k_weights, residual=residual, capacity=capacity, implementation=implementation,
        )  # fmt: skip

    return experts


def arms(shape: Shape, device: str) -> tuple[list[Arm], list[Absent]]:
    """Arms of a shape, ours first, and those whose package is not here. `reference` is timed on a CPU only."""
    found = [Arm(OURS, op(OURS))]
    if device == "cpu":
        found.append(Arm("reference", op("reference")))
    latent = shape.op == "latent_glu_experts"
    for capacity in shape.capacities or (None,):
        suffix = "" if capacity is None else f"-c{capacity}"
        found.append(Arm(f"padded{suffix}", op("padded", capacity), capacity))
        found.append(Arm(f"torch-bmm{suffix}", peers.torch_bmm(capacity), capacity, pads=not latent))
    makers = {"torch-grouped-mm": peers.torch_grouped_mm, "grouped-mm-bf16": peers.grouped_mm_bf16,
              "scattermoe": peers.scattermoe}  # fmt: skip
    if not latent:
        makers |= {"transformers": peers.transformers, "liger-kernel": peers.liger}
    absent = []
    for name, make in makers.items():
        try:
            found.append(Arm(name, make(), pads=not latent))
        except ImportError as error:
            absent.append(Absent(name, f"not importable ({error})"))
    return found, absent


def output(arm: Arm, problem: Problem) -> torch.Tensor:
    """The whole pass of a problem: routed rows, and where the shape has them the shared expert and W_down."""
    if problem.w_down is None:
        return arm.experts(problem, None)
    return arm.experts(problem, _shared(problem)) @ problem.w_down.mT


def _shared(problem: Problem) -> torch.Tensor:
    """The shared expert's h, as wide as W_down; plain torch, the same for every arm."""
    assert problem.shared_gate_up is not None
    assert problem.shared_v is not None
    assert problem.w_down is not None
    p, q = (problem.hidden_states @ problem.shared_gate_up.mT).chunk(2, dim=-1)
    v = problem.shared_v
    wider = problem.w_down.shape[1] - v.shape[0]
    if wider:
        # rows of zeros: the product then writes the pad columns, where padding h would copy it
        v = torch.nn.functional.pad(v, (0, 0, 0, wider))
    return (torch.nn.functional.silu(p) * q) @ v.mT
