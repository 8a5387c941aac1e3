"""A shape's whole comparison: reference, arms, parts; what disagrees gets no ratio, what cannot run is listed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from dormouse_bench import timing
from dormouse_bench.moe import arms, costs, measure, parts
from dormouse_bench.moe.arms import OURS, Absent, Arm
from dormouse_bench.moe.costs import Cost, Rates
from dormouse_bench.moe.measure import Measured
from dormouse_bench.moe.problem import Problem
from dormouse_bench.moe.shapes import Shape
from dormouse_bench.rows import Origin, Row

Say = Callable[[str], None]


@dataclass
class Result:
    """What was measured at one shape."""

    name: str
    shape: Shape
    itemsize: int
    active: int
    """Experts with rows."""
    loads: str
    """The routing in words."""
    measured: list[Measured] = field(default_factory=list)
    absent: list[Absent] = field(default_factory=list)
    noise: float | None = None
    """How far two measurements of our own forward with backward were apart, relative."""

    def floor(self, phase: str, rates: Rates, *, expanded: bool = False) -> float | None:
        """Milliseconds at the machine's ceilings; None for a part without a cost model."""
        parts = self.costs(phase, expanded=expanded)
        return costs.floor_ms(parts, rates) if parts else None

    def costs(self, phase: str, *, expanded: bool = False) -> tuple[Cost, ...]:
        """Bytes and operations of a phase's parts; none for "route"."""
        if phase == "combine":
            return (costs.combine(self.shape, itemsize=self.itemsize),)
        if phase == "route":
            return ()
        phase = phase.removesuffix("-graph")
        return costs.whole(self.shape, phase, itemsize=self.itemsize, active=self.active, expanded=expanded)

    def rows(self, rates: Rates, origin: Origin) -> list[Row]:
        """Rows of what agreed with the reference."""
        return [
            Row(
                bench="moe", shape=self.name, phase=each.phase, implementation=each.implementation, ms=each.ms,
                floor_ms=self.floor(each.phase, rates), peak_extra_bytes=each.peak_extra_bytes, **origin.model_dump(),
            )
            for each in self.measured
            if not each.disagreement
        ]  # fmt: skip

    def disagreements(self) -> list[str]:
        """A sentence for every arm or part that computes something else."""
        said = {each.implementation: each for each in self.measured if each.disagreement}
        return [f"{self.name}: {name}: {each.disagreement}" for name, each in said.items()]


def compare(
    name: str, problem: Problem, *, device: str, budget_ms: int, only: Sequence[str] = (), say: Say = print
) -> Result:
    """Measures every arm of a problem (those in `only`, when given), one at a time, `say`ing how far it is."""
    shape = problem.shape
    counts = problem.counts()
    loads = f"{shape.routing} routing, {int(counts.min())} to {int(counts.max())} rows an expert"
    result = Result(name, shape, problem.hidden_states.element_size(), int((counts > 0).sum()), loads)
    found, missing = arms.arms(shape, device)
    result.absent += [each for each in missing if not only or each.name in only]
    wanted = [arm for arm in found if not only or arm.name in only]
    # By capacity, so that one reference at a time is held: at b1 it is as large as two banks in fp32. Peers' kernels
    # come last, since one that reads out of bounds ends the process's use of the device.
    for capacity in sorted({arm.capacity for arm in wanted}, key=lambda each: (each is None, each or 0)):
        want = measure.truth(problem, capacity)
        for arm in (each for each in wanted if each.capacity == capacity):
            say(f"{name}: {arm.name}")
            _measure(result, arm, problem, want, device, budget_ms)
        del want
    places = {arm.name: place for place, arm in enumerate(found)}
    result.measured.sort(key=lambda each: places[each.implementation])
    if not only and not shape.shared_rank:  # a pass with more around it has the same parts
        say(f"{name}: parts")
        more, missing = parts.measure(problem, device=device, budget_ms=budget_ms)
        result.measured += more
        result.absent += missing
    result.noise = _again(result, wanted, problem, device, budget_ms)
    return result


def _measure(result: Result, arm: Arm, problem: Problem, want: measure.Values, device: str, budget_ms: int) -> None:
    """Adds every phase of an arm that runs; peers raise many kinds of errors, and their compilers more."""
    try:
        trial = measure.trial(arm, problem, want, device=device, budget_ms=budget_ms)
    except Exception as error:
        result.absent.append(Absent(arm.name, arms.reason(error)))
        return
    for phase in trial.phases():
        try:
            result.measured.append(trial.measure(phase))
        except Exception as error:
            result.absent.append(Absent(f"{arm.name} {phase}", arms.reason(error)))
    if device == "cuda":
        torch.cuda.empty_cache()


def _again(result: Result, wanted: Sequence[Arm], problem: Problem, device: str, budget_ms: int) -> float | None:
    """Our first arm's forward with backward once more, after everything else: the distance is the noise."""
    first = next((each for each in result.measured if each.phase == "fwd+bwd" and each.implementation == OURS), None)
    if first is None:
        return None
    arm = next(arm for arm in wanted if arm.name == OURS)
    ms = timing.median_ms(measure.both(arm, problem), device, budget_ms)
    return abs(ms - first.ms) / first.ms
