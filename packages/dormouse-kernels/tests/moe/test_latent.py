"""The Triton kernels of the latent expert pass, in the interpreter or on a GPU: every tail and extreme of routing."""

from dataclasses import replace

import pytest
import torch
from dormouse_kernels import Counters, latent_glu_experts, route
from dormouse_kernels.moe.latent import launches
from dormouse_kernels.moe.latent.op import Saved, data_gradients, weight_gradients
from dormouse_kernels.moe.latent.plan import plan_for
from dormouse_kernels.moe.latent.tiles import tiles_on
from dormouse_kernels.moe.selection import TRITON_RANKS
from dormouse_kernels.proof import oracle, relative_errors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("out", "dx", "dU", "ds", "dV", "dw", "dres")


def fp32_plan(case):
    return plan_for(route(case.top_k_index, 5), tiles_on(torch.device(DEVICE), torch.float32, case.v.shape[2]))


def values(out, case):
    leaves = list(case.leaves().values())
    grads = torch.autograd.grad(out, leaves, case.grad.to(out.device, out.dtype), materialize_grads=True)
    return dict(zip(NAMES, (out, *grads), strict=True))


def run(case, **options):
    out = latent_glu_experts(
        case.hidden_states, case.gate_up_proj, case.scale, case.v, case.top_k_index, case.top_k_weights,
        residual=case.residual, implementation="triton", **options,
    )  # fmt: skip
    return values(out, case)


def wanted(case):
    out = oracle.latent_glu_experts(
        case.hidden_states, case.gate_up_proj, case.scale, case.v, case.top_k_index, case.top_k_weights, case.residual
    )
    return values(out, case)


def assert_equals_the_oracle(case, bound=3e-6):
    errors = relative_errors(run(case), wanted(case), by_expert=("dU", "ds", "dV"))
    assert all(error <= bound for error in errors.values()), errors


@pytest.fixture
def fp32_case(latent_case):
    return lambda *sizes, **options: latent_case(*sizes, dtype=torch.float32, **options).to(torch.float32, DEVICE)


@pytest.mark.parametrize("f", [1, 16, 37, 203])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_value_and_every_gradient_equal_the_dense_loop(fp32_case, f, k):
    assert_equals_the_oracle(fp32_case(f=f, k=k))


@pytest.mark.parametrize("r", TRITON_RANKS)
def test_every_rank_with_a_tile_equals_the_dense_loop(fp32_case, r):
    assert_equals_the_oracle(fp32_case(r=r))


def test_two_experts_of_several_tiles_take_turns_on_every_token(fp32_case):
    assert_equals_the_oracle(fp32_case(T=40, top_k_index=torch.tensor([[0, 3]]).repeat(40, 1).to(DEVICE)))


def test_an_idle_experts_gradients_are_exact_zeros(fp32_case):
    case = fp32_case(T=11, top_k_index=torch.tensor([[0, 3]]).repeat(11, 1).to(DEVICE))
    got = run(case)
    for name in ("dU", "ds", "dV"):
        assert (got[name][[1, 2, 4]] == 0).all(), name
        assert (got[name][[0, 3]] != 0).any(), name


def test_pad_columns_are_exact_zeros_whatever_the_residuals_hold(fp32_case):
    got = run(fp32_case(f=37))
    assert (got["out"][:, 37:] == 0).all()
    assert (got["dres"][:, 37:] == 0).all()


def test_half_precision_equals_the_dense_loop_within_its_rounding(latent_case):
    case = latent_case(dtype=torch.float16).to(torch.float16, DEVICE)
    assert_equals_the_oracle(case, bound=4e-3)


def test_banks_narrower_than_the_tokens_are_promoted(fp32_case):
    case = fp32_case()
    for name in ("gate_up_proj", "v"):
        setattr(case, name, getattr(case, name).detach().half().requires_grad_())
    got, want = run(case), wanted(case)
    assert got["out"].dtype == torch.float32
    assert got["dV"].dtype == torch.float16
    errors = relative_errors({n: got[n].float() for n in NAMES}, {n: want[n].float() for n in NAMES})
    assert all(error <= (1e-3 if name in ("dU", "dV") else 3e-6) for name, error in errors.items()), errors


def test_gradients_apart_are_those_of_the_whole_and_accumulate(fp32_case):
    case = fp32_case(T=40)
    plan = fp32_plan(case)
    arguments = [t.detach() for t in (case.hidden_states, case.gate_up_proj, case.scale, case.v, case.top_k_weights)]
    _, latents = launches.run_forward(*arguments, None, plan, torch.float32)
    saved = Saved(*arguments, latents, plan)
    dx, dweights, stash = data_gradients(saved, case.grad)
    weights = weight_gradients(saved, case.grad, stash)
    apart = {"dx": dx, "dU": weights.gate_up, "ds": weights.scale, "dV": weights.v, "dw": dweights}
    whole = run(case)
    for name, got in apart.items():
        assert torch.equal(got, whole[name]), name
    added = weight_gradients(saved, case.grad, stash, into=weights)
    for name, got in (("dU", added.gate_up), ("ds", added.scale), ("dV", added.v)):
        torch.testing.assert_close(got, 2 * whole[name])


def test_turns_and_expanded_rows_agree(fp32_case):
    case = fp32_case(T=40)
    plan = fp32_plan(case)
    expanded = replace(plan, tiles=replace(plan.tiles, turns=False))
    arguments = [t.detach() for t in (case.hidden_states, case.gate_up_proj, case.scale, case.v, case.top_k_weights)]
    residual = case.residual.detach()
    turned, _ = launches.run_forward(*arguments, residual, plan, torch.float32)
    summed, _ = launches.run_forward(*arguments, residual, expanded, torch.float32)
    torch.testing.assert_close(turned, summed)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_auto_falls_back_counted_where_a_capacity_is_asked_for(fp32_case):
    case = fp32_case()
    with Counters() as counters:
        latent_glu_experts(
            case.hidden_states, case.gate_up_proj, case.scale, case.v, case.top_k_index, case.top_k_weights, capacity=3
        )
        run(case)
    calls = {key for key in counters.snapshot() if not key.endswith("dropped")}
    site = "moe.latent_glu_experts/forward"
    assert calls == {f"{site}/padded", f"{site}/fallback:capacity", f"{site}/triton"}
