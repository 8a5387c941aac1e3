"""One arm on one problem: whether it computes the reference's values, then its time, its memory and its waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dormouse_bench import timing
from dormouse_bench.agreement import ROUNDING, distance, farthest
from dormouse_bench.moe.arms import Arm, op, output
from dormouse_bench.moe.problem import Problem

Values = dict[str, torch.Tensor]
Tensors = tuple[torch.Tensor, ...]
Work = Callable[[], Tensors]
WIDER = {torch.bfloat16: torch.float32, torch.float32: torch.float64}
"""What the reference computes in."""


@dataclass(frozen=True)
class Measured:
    """One arm in one phase."""

    phase: str
    implementation: str
    ms: float
    peak_extra_bytes: int | None
    syncs: int | None
    dropped: float
    """Share of the rows that it did not compute."""
    worst: float
    """Largest relative distance of an output or gradient from the reference's."""
    disagreement: str = ""
    """Not empty: what is wrong with its values; its time is then compared with nothing."""


def truth(problem: Problem, capacity: int | None) -> Values:
    """Output and every gradient by the `reference` implementation in the next wider dtype."""
    wide = problem.to(WIDER[problem.hidden_states.dtype])
    return _values(Arm("reference", op("reference", capacity), capacity), wide)


@dataclass(frozen=True, eq=False)
class Trial:
    """An arm that ran once on a problem and was held to the reference; its phases are measured one by one."""

    arm: Arm
    problem: Problem
    device: str
    budget_ms: int
    dropped: float
    worst: float
    disagreement: str

    def phases(self) -> tuple[str, ...]:
        """What can be measured: on CUDA a graph's replay too, "-graph"."""
        eager = ("fwd", "bwd", "fwd+bwd")
        return (*eager, "fwd-graph", "fwd+bwd-graph") if self.device == "cuda" else eager

    def measure(self, phase: str) -> Measured:
        """One phase. Errors: whatever the arm raises; `ValueError` for a graph of an arm that waits for the device."""
        work = self._work(phase.removesuffix("-graph"))
        syncs = timing.host_syncs(work, self.device)
        extra, disagreement = None, self.disagreement
        if phase.endswith("-graph"):
            if syncs:
                raise ValueError(f"waits for the device {syncs} times a call: a graph cannot hold that")
            eager = work()
            work, kept = captured(work)
            disagreement = disagreement or self._replayed_elsewhere(work, kept, eager)
        else:
            gradients = self._gradient_bytes() if "bwd" in phase else 0
            extra = timing.peak_extra_bytes(work, self.device, gradients)
        ms = timing.median_ms(work, self.device, self.budget_ms)
        return Measured(phase, self.arm.name, ms, extra, syncs, self.dropped, self.worst, disagreement)

    def _replayed_elsewhere(self, replay: Work, kept: Tensors, eager: Tensors) -> str:
        """A sentence when a replay leaves other values than the eager call made, or ""."""
        for tensor in kept:
            tensor.fill_(float("nan"))
        replay()
        far = farthest(kept, eager)
        return "" if far <= ROUNDING[self.problem.hidden_states.dtype] else f"a replayed graph is {far:.1e} away"

    def _work(self, phase: str) -> Work:
        if phase == "fwd":
            return torch.no_grad()(lambda: (output(self.arm, self.problem),))
        return both(self.arm, self.problem) if phase == "fwd+bwd" else backward(self.arm, self.problem)

    def _gradient_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.problem.leaves().values())


def trial(arm: Arm, problem: Problem, want: Values, *, device: str, budget_ms: int) -> Trial:
    """Runs an arm once and compares every value with the reference's. Errors: whatever the arm raises."""
    dropped = problem.dropped(arm.capacity)
    if not arm.pads:
        problem = problem.unpadded()
    worst, disagreement = compare(_values(arm, problem), want, problem)
    return Trial(arm, problem, device, budget_ms, dropped, worst, disagreement)


def both(arm: Arm, problem: Problem) -> Work:
    """Forward, then every gradient: what a training step asks of the pass."""
    leaves = list(problem.leaves().values())
    upstream = _upstream(output(arm, problem).detach())
    return lambda: torch.autograd.grad(output(arm, problem), leaves, upstream)


def backward(arm: Arm, problem: Problem) -> Work:
    """The backward alone, over one forward that is kept."""
    out = output(arm, problem)
    leaves, upstream = list(problem.leaves().values()), _upstream(out.detach())
    return lambda: torch.autograd.grad(out, leaves, upstream, retain_graph=True)


def captured(work: Work) -> tuple[Callable[[], Tensors], Tensors]:
    """(the replay of the same work, the tensors that it writes), captured once in a CUDA graph.

    A replay has no host time between its kernels.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()

    def replay() -> Tensors:
        graph.replay()
        return kept

    return replay, kept


def compare(got: Values, want: Values, problem: Problem) -> tuple[float, str]:
    """(the largest relative distance, a sentence when a tensor is further away than rounding can bring it or "")."""
    worst, sentence = 0.0, ""
    coarse = ROUNDING[problem.hidden_states.dtype]
    for name, values in want.items():
        mine = got[name]
        if mine.shape != values.shape:
            mine, values = mine[..., : problem.shape.f], values[..., : problem.shape.f]
        far = distance(mine, values)
        if not far <= max(coarse, ROUNDING[mine.dtype]) and not sentence:  # a NaN is a disagreement
            sentence = f"{name} is {far:.1e} away from the reference"
        worst = far if far != far else max(worst, far)
    return worst, sentence


def _values(arm: Arm, problem: Problem) -> Values:
    leaves = problem.leaves()
    out = output(arm, problem)
    gradients = torch.autograd.grad(out, list(leaves.values()), _upstream(out.detach()))
    return {"out": out.detach()} | {f"grad {name}": each for name, each in zip(leaves, gradients, strict=True)}


def _upstream(out: torch.Tensor) -> torch.Tensor:
    """The same gradient for every arm: bf16 values, drawn 256 columns at a time so that a wider h gets the same."""
    source = torch.Generator(out.device).manual_seed(2)
    made = torch.empty_like(out, memory_format=torch.contiguous_format)
    for columns in made.split(256, dim=1):
        drawn = torch.randn(256, out.shape[0], generator=source, device=out.device, dtype=torch.float32)
        columns.copy_(drawn[: columns.shape[1]].mT.to(torch.bfloat16))
    return made
