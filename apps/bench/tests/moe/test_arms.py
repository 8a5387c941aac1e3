"""Every arm that a CPU can run computes the reference's output and gradients; one that does not gets no ratio."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from dormouse_bench import timing
from dormouse_bench.moe import arms, measure, peers, report, suite
from dormouse_bench.moe.arms import Arm
from dormouse_bench.moe.costs import Rates
from dormouse_bench.moe.measure import Measured
from dormouse_bench.moe.problem import make
from dormouse_bench.moe.shapes import SHAPES, TINY
from dormouse_bench.moe.suite import Result
from dormouse_bench.rows import Origin

HERE = Origin.model_validate(
    {"machine": "here", "torch": "2", "triton": "3", "commit": "unknown", "date": "2031-01-02"}
)
RATES = Rates(bytes_per_second=1e9, flops_per_second=1e9)
ALIGNED = replace(TINY, f=48)


def quiet(line):
    """Says nothing."""


def judged(arm, shape=TINY):
    given = make(shape, torch.float32, "cpu")
    return measure.trial(arm, given, measure.truth(given, arm.capacity), device="cpu", budget_ms=1)


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch):
    """Ours refuses a CPU, as it does unless another test's process interprets kernels, which takes seconds a call."""
    real = arms.op

    def op(implementation, capacity=None):
        if implementation != arms.OURS:
            return real(implementation, capacity)

        def experts(given, residual):
            raise ValueError("ours: it needs a CUDA device\nand says more")

        return experts

    monkeypatch.setattr(arms, "op", op)


@pytest.mark.parametrize("name", ["tiny", "tiny-zipf", "tiny-scope", "tiny-glu"])
def test_every_arm_agrees_with_the_reference_or_says_why_it_is_absent(name):
    given = make(SHAPES[name], torch.float32, "cpu")
    found = suite.compare(name, given, device="cpu", budget_ms=1, say=quiet)
    assert not found.disagreements()
    ran = {each.implementation for each in found.measured if each.phase == "fwd+bwd"}
    padded = {"padded", "torch-bmm"}
    if found.shape.capacities:
        padded = {f"{arm}-c{capacity}" for arm in padded for capacity in found.shape.capacities}
    assert ran >= {"reference"} | padded
    parts = set() if found.shape.shared_rank else {"route", "combine"}
    assert {each.phase for each in found.measured} == {"fwd", "bwd", "fwd+bwd"} | parts
    assert all(each.reason for each in found.absent)
    known, missing = arms.arms(found.shape, "cpu")
    assert ran | {each.name for each in found.absent} == {each.name for each in (*known, *missing)}


@pytest.mark.parametrize("op", ["latent_glu_experts", "glu_experts"])
def test_grouped_products_agree_where_their_strides_are_allowed(op):
    shape = ALIGNED if op == "latent_glu_experts" else SHAPES["tiny-glu"]
    trial = judged(Arm("torch-grouped-mm", peers.torch_grouped_mm(), pads=op == "glu_experts"), shape)
    assert not trial.disagreement, trial.disagreement


def test_dropping_arms_are_held_to_the_reference_that_drops_the_same():
    trial = judged(Arm("torch-bmm-c8", peers.torch_bmm(8), 8, pads=False))
    assert not trial.disagreement
    assert trial.dropped > 0.4
    whole = make(TINY, torch.float32, "cpu")
    dropless = measure.truth(whole, None)
    assert measure.compare(measure.truth(whole, 8), dropless, whole)[1]


@pytest.mark.parametrize("name", ["out", "grad hidden_states", "grad gate_up_proj", "grad scale", "grad down"])
def test_a_wrong_tensor_is_named_and_its_arm_gets_no_ratio_and_no_row(name, monkeypatch):
    real = measure._values

    def planted(arm, given):
        found = real(arm, given)
        return found if arm.name == "reference" else found | {name: found[name] * 1.001}

    monkeypatch.setattr(measure, "_values", planted)
    given = make(TINY, torch.float32, "cpu")
    found = suite.compare("tiny", given, device="cpu", budget_ms=1, only=["reference", "padded-c48"], say=quiet)
    (sentence,) = found.disagreements()
    assert sentence.startswith(f"tiny: padded-c48: {name} is 1.0e-03 away from the reference")
    assert {row.implementation for row in found.rows(RATES, HERE)} == {"reference"}
    (line,) = [line for line in report.table([found], RATES).splitlines() if "| fwd | padded-c48 |" in line]
    columns = dict(zip(report.COLUMNS, (cell.strip() for cell in line.strip("|").split("|")), strict=True))
    assert columns["x floor"] == columns["x expanded"] == ""
    assert columns["worst error"].endswith("disagrees")
    assert not [line for line in report.summary(found) if "times as fast" in line]


def test_a_gradient_that_is_no_number_disagrees():
    given = make(TINY, torch.float32, "cpu")
    want = measure.truth(given, None)
    got = want | {"grad down": want["grad down"] * float("nan")}
    worst, sentence = measure.compare(got, want, given)
    assert worst != worst
    assert sentence.startswith("grad down is nan away")


def test_a_peer_that_is_not_installed_is_listed(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.fused_moe", None)
    _, missing = arms.arms(SHAPES["tiny-glu"], "cpu")
    reasons = {each.name: each.reason for each in missing}
    assert reasons["liger-kernel"].startswith("not importable (")
    assert reasons["scattermoe"].startswith("not importable (")


def test_scattermoe_s_two_products_are_called_as_its_functions_are_made(monkeypatch):
    """A stand-in with the same two functions in plain torch: rows by expert, gates in the second product."""

    def flatten_sort_count(index, experts):
        flat = index.flatten()
        found = flat.sort(stable=True)
        return found.values, found.indices, flat.bincount(minlength=experts).cumsum(0)

    def parallel_linear(x, bank, k, experts_of, slots, ends, gates=None, grouped_in=False, grouped_out=False):
        rows = x if grouped_in else x[slots // k]
        made = torch.einsum("rn,rnm->rm", rows, bank[experts_of])
        if grouped_out:
            return made
        assert gates is not None
        by_slot = torch.zeros_like(made).index_copy(0, slots, made)
        return (gates.unsqueeze(1) @ by_slot.view(*gates.shape, -1)).squeeze(1)

    package = ModuleType("scattermoe.parallel_experts")
    package.__dict__.update(flatten_sort_count=flatten_sort_count, parallel_linear=parallel_linear)
    monkeypatch.setitem(sys.modules, "scattermoe", ModuleType("scattermoe"))
    monkeypatch.setitem(sys.modules, "scattermoe.parallel_experts", package)
    trial = judged(Arm("scattermoe", peers.scattermoe(), pads=False))
    assert not trial.disagreement, trial.disagreement


def test_an_implementation_that_refuses_is_absent_with_its_sentence():
    given = make(TINY, torch.float32, "cpu")
    found = suite.compare("tiny", given, device="cpu", budget_ms=1, only=["triton"], say=quiet)
    assert found.absent == [arms.Absent("triton", "ours: it needs a CUDA device")]
    assert not found.measured


def test_the_upstream_gradient_does_not_depend_on_the_padding():
    narrow, wide = (measure._upstream(torch.empty(5, width)) for width in (300, 304))
    assert torch.equal(narrow, wide[:, :300])
    assert torch.equal(narrow, measure._upstream(torch.empty(5, 300, dtype=torch.float64)).float())


def test_ours_stands_beside_the_fastest_that_drops_nothing_and_a_faster_one_that_drops():
    def timed(implementation, ms, dropped=0.0, disagreement=""):
        return Measured("fwd", implementation, ms, None, None, dropped, 0.0, disagreement)

    found = Result("b1", TINY, 4, 6, "", measured=[timed("triton", 2.0), timed("slow", 9.0), timed("whole", 5.0)])
    assert report.summary(found)[1:] == ["b1 fwd: triton 2 ms, 2.50 times as fast as whole (5 ms)"]
    found.measured += [timed("drops", 3.0, dropped=0.125), timed("wrong", 1.0, disagreement="out is off")]
    assert report.summary(found)[1:3] == [
        "b1 fwd: triton 2 ms, 2.50 times as fast as whole (5 ms)",
        "b1 fwd: triton 2 ms, 1.50 times as fast as drops (3 ms, which drops 12.50% of the rows)",
    ]


def replaying(monkeypatch, broken=False):
    """Stands in for CUDA: a graph is the work done again into the tensors of its capture."""

    def captured(work):
        kept = work()

        def replay():
            for tensor, fresh in zip(kept, work(), strict=True):
                if not broken:
                    tensor.copy_(fresh)
            return kept

        return replay, kept

    monkeypatch.setattr(measure, "captured", captured)
    monkeypatch.setattr(timing, "host_syncs", lambda work, device: 0)


@pytest.mark.parametrize("phase", ["fwd-graph", "fwd+bwd-graph"])
def test_a_replay_that_leaves_other_values_disagrees(monkeypatch, phase):
    trial = judged(Arm("torch-bmm-c48", peers.torch_bmm(48), 48, pads=False))
    replaying(monkeypatch)
    assert not trial.measure(phase).disagreement
    replaying(monkeypatch, broken=True)
    assert trial.measure(phase).disagreement == "a replayed graph is nan away"


def test_an_arm_that_waits_for_the_device_is_in_no_graph(monkeypatch):
    trial = judged(Arm("torch-bmm", peers.torch_bmm(None), pads=False))
    replaying(monkeypatch)
    monkeypatch.setattr(timing, "host_syncs", lambda work, device: 2)
    with pytest.raises(ValueError, match="waits for the device 2 times a call"):
        trial.measure("fwd-graph")
    assert trial.measure("fwd").syncs == 2
