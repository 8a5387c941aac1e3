"""The expert benchmark measures what it says, and refuses to compare arms that differ."""

from __future__ import annotations

import pytest
import torch
from dormouse_bench import experts
from dormouse_bench.experts import Shape, arguments, compare, passes, refuse_disagreement
from dormouse_bench.rows import Origin
from dormouse_kernels import Counters
from dormouse_train.config import load_config

TINY = Shape(tokens=11, d=48, r=16, f=37, experts=5, k=2)
HERE = Origin.model_validate(
    {"machine": "here", "torch": "2", "triton": "3", "commit": "unknown", "date": "2031-01-02"}
)


def test_a_named_configuration_is_raced_at_its_own_step():
    config = load_config("nano")
    nano = experts.shapes()["nano"]
    assert nano.tokens == config.train.batch * config.train.seq
    assert (nano.d, nano.r, nano.f) == (config.model.d_model, config.experts.rank, config.experts.d_ffn)
    assert (nano.experts, nano.k) == (config.experts.num_experts, config.experts.top_k)


def test_a_comparison_has_a_row_for_every_arm_and_phase():
    result = compare("tiny", TINY, "cpu", torch.float32, 1, HERE)
    keys = [(row.phase, row.implementation) for row in result.rows]
    assert keys == [(phase, arm) for phase in ("fwd", "fwd+bwd") for arm in ("reference", "padded")]
    assert {(row.bench, row.shape, row.machine, row.peak_extra_bytes) for row in result.rows} == {
        ("experts", "tiny", "here", None)
    }
    assert all(result.races[row.phase].ms[row.implementation] == row.ms for row in result.rows)


@pytest.mark.parametrize("implementation", experts.IMPLEMENTATIONS)
def test_an_arm_runs_its_own_implementation_and_no_fallback(implementation):
    with Counters() as counters:
        passes(arguments(TINY, torch.float32, "cpu"), implementation)["fwd+bwd"]()
    ran = {key.rsplit("/", 1)[1] for key in counters.snapshot()}
    assert ran == {implementation}


def test_the_backward_phase_gives_every_gradient():
    both = passes(arguments(TINY, torch.float32, "cpu"), "reference")["fwd+bwd"]()
    assert set(both) == {f"grad {name}" for name in ("hidden_states", "gate_up_proj", "scale", "v", "top_k_weights")}


def test_loads_are_uneven_and_the_same_for_a_seed():
    shape = Shape(tokens=2048, d=48, r=16, f=37, experts=16, k=2)
    first, again, other = (arguments(shape, torch.float32, "cpu", seed) for seed in (0, 0, 1))
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not torch.equal(first.v, other.v)
    loads = first.top_k_index.flatten().bincount(minlength=16)
    assert loads.max() > 2 * loads.float().mean()


@pytest.mark.parametrize("fault", [1e-3, float("nan")])
def test_arms_that_differ_are_not_compared(monkeypatch, fault):
    real = experts.latent_glu_experts

    def planted(*given, implementation, routing):
        out = real(*given, implementation=implementation, routing=routing)
        return out if implementation == "reference" else out + fault * out.detach().abs()

    monkeypatch.setattr(experts, "latent_glu_experts", planted)
    with pytest.raises(experts.DisagreementError, match=r"padded is .* away from reference in out"):
        compare("tiny", TINY, "cpu", torch.float32, 1, HERE)


def far(dtype: torch.dtype, times: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    want = torch.linspace(1, 2, 1000, dtype=torch.float64)
    return {"out": (want * (1 + times)).to(dtype)}, {"out": want.to(dtype)}


@pytest.mark.parametrize(("dtype", "computed"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_a_tensor_is_held_to_the_coarser_of_its_two_dtypes(dtype, computed):
    refuse_disagreement("padded", *far(dtype, 2**-7), computed)
    with pytest.raises(experts.DisagreementError):
        refuse_disagreement("padded", *far(dtype, 0.05), computed)


def test_fp32_is_held_to_fp32():
    refuse_disagreement("padded", *far(torch.float32, 2**-23), torch.float32)
    with pytest.raises(experts.DisagreementError):
        refuse_disagreement("padded", *far(torch.float32, 2**-13), torch.float32)
