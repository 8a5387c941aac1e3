"""Which implementation wins where: forward with backward over experts, rows an expert, rank and width.

What `implementation="auto"` does with a shape on CUDA is held against these rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from dormouse_bench.moe import arms, measure, problem
from dormouse_bench.moe.arms import OURS, reason
from dormouse_bench.moe.shapes import Shape
from dormouse_bench.rows import Origin, Row

IMPLEMENTATIONS = (OURS, "padded", "torch-grouped-mm")
MOST_ROWS = 1 << 17
"""Larger products of experts and rows are left out: minutes, and nothing that the others do not say."""
PHASES = {"cuda": ("fwd+bwd", "fwd+bwd-graph"), "cpu": ("fwd+bwd",)}
"""A graph's replay has no host time between its kernels: at small sizes the eager times are the host's."""


def shapes(device: str) -> dict[str, Shape]:
    """Sizes by name: letters of `explain` with their values, `n` being rows an expert on average."""
    if device != "cuda":
        return dict(
            _named(Shape("latent_glu_experts", 24, 32, 16, 37, 4, 2), Shape("glu_experts", 24, 32, 16, 32, 4, 2))
        )
    latent = (
        Shape("latent_glu_experts", experts * rows // 2, d, rank, 8 * d // 3, experts, 2)
        for experts, rows, rank, d in product((8, 64, 512), (16, 128, 1024, 4096), (16, 64, 128), (512, 2048))
        if experts * rows <= MOST_ROWS
    )
    swiglu = (
        Shape("glu_experts", experts * rows // 2, d, inner, d, experts, 2)
        for experts, rows, inner, d in product((8, 64), (16, 128, 1024, 4096), (64, 768), (512, 2048))
        if experts * rows <= MOST_ROWS
    )
    return dict(_named(*latent, *swiglu))


def _named(*sizes: Shape) -> Iterator[tuple[str, Shape]]:
    for each in sizes:
        kind = "latent" if each.op == "latent_glu_experts" else "glu"
        yield f"{kind}-e{each.experts}-n{each.rows // each.experts}-r{each.r}-d{each.d}", each


def run(sizes: Mapping[str, Shape], device: str, budget_ms: int, origin: Origin) -> Iterator[Outcome]:
    """What every size showed, one at a time: a run that is stopped keeps what it has."""
    for name, shape in sizes.items():
        yield _one(name, shape, device, budget_ms, origin)


@dataclass
class Outcome:
    """One size: rows of the implementations that agree with the reference, and sentences of the others."""

    name: str
    rows: list[Row] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def line(self) -> str:
        """All of it in one line."""
        times = [f"{row.implementation} {row.phase} {row.ms:.4g} ms" for row in self.rows]
        return f"{self.name}: {', '.join([*times, *self.absent, *self.wrong])}"


def _one(name: str, shape: Shape, device: str, budget_ms: int, origin: Origin) -> Outcome:
    import torch

    given = problem.make(shape, torch.bfloat16 if device == "cuda" else torch.float32, device)
    want = measure.truth(given, None)
    outcome = Outcome(name)
    for arm in arms.arms(shape, device)[0]:
        if arm.name not in IMPLEMENTATIONS:
            continue
        try:
            trial = measure.trial(arm, given, want, device=device, budget_ms=budget_ms)
        except Exception as error:  # peers raise many kinds
            outcome.absent.append(f"{arm.name} absent ({reason(error)})")
            continue
        for phase in PHASES[device]:
            _add(outcome, trial, phase, origin)
    return outcome


def _add(outcome: Outcome, trial: measure.Trial, phase: str, origin: Origin) -> None:
    name = trial.arm.name
    try:
        measured = trial.measure(phase)
    except Exception as error:  # an arm that waits for the device is in no graph
        outcome.absent.append(f"{name} {phase} absent ({reason(error)})")
        return
    if measured.disagreement:
        outcome.wrong.append(f"{name} {phase} disagrees: {measured.disagreement}")
        return
    outcome.rows.append(
        Row(
            bench="sweep", shape=outcome.name, phase=phase, implementation=name, ms=measured.ms, floor_ms=None,
            peak_extra_bytes=measured.peak_extra_bytes, **origin.model_dump(),
        )
    )  # fmt: skip


def winners(rows: Sequence[Row]) -> dict[tuple[str, str], str]:
    """The fastest implementation by shape and phase."""
    best: dict[tuple[str, str], Row] = {}
    for row in rows:
        held = best.get((row.shape, row.phase))
        if held is None or row.ms < held.ms:
            best[row.shape, row.phase] = row
    return {key: row.implementation for key, row in best.items()}
