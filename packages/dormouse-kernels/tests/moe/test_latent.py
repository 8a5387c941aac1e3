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


def test_sums_over_an_experts_rows_do_not_stall_in_half_precision():
    """One upstream row of 1 and 256 of 2⁻¹², whose sum fp16 would leave at 1: 17 tiles of the interpreter's."""
    T, r = 257, 16
    hidden, gate_up = torch.ones(T, 16).half().to(DEVICE), torch.full((1, 2 * r, 16), 1 / 16).half().to(DEVICE)
    scale = torch.ones(1, 2 * r).half().to(DEVICE).requires_grad_()
    v = torch.eye(r).half().to(DEVICE).unsqueeze(0).requires_grad_()
    index = torch.zeros(T, 1, dtype=torch.int64, device=DEVICE)
    weights = torch.ones(T, 1, device=DEVICE)
    out = latent_glu_experts(hidden, gate_up, scale, v, index, weights, implementation="triton")
    upstream = torch.full_like(out, 2.0**-12)
    upstream[0] = 1
    grad_scale, grad_v = torch.autograd.grad(out, (scale, v), upstream)
    # p = q = 1: the gradients of s' and of V are silu(1) a row
    want = torch.sigmoid(torch.tensor(1.0)).item() * (1 + 256 / 4096)
    assert grad_scale[0, r:].float().cpu() == pytest.approx(want, rel=2e-3)
    assert grad_v.float().cpu() == pytest.approx(want, rel=2e-3)


def test_equal_rows_combine_to_themselves_at_half_weights(latent_case):
    case = latent_case(E=1, dtype=torch.float16).to(torch.float16, DEVICE)
    arguments = case.hidden_states, case.gate_up_proj, case.scale, case.v
    index, weights = torch.zeros(11, 2, dtype=torch.int64, device=DEVICE), torch.full((11, 2), 0.5, device=DEVICE)
    one = latent_glu_experts(*arguments, index[:, :1], 2 * weights[:, :1], implementation="triton")
    assert torch.equal(latent_glu_experts(*arguments, index, weights, implementation="triton"), one)


def test_the_weight_of_a_slot_scales_its_expert_once(fp32_case):
    case = fp32_case(T=1, E=2, top_k_index=torch.tensor([[0, 1]], device=DEVICE))
    with torch.no_grad():
        for bank in (case.gate_up_proj, case.scale, case.v):
            bank[1] = bank[0]
        case.residual.zero_()
    got = {}
    for weights in ((0.9, 0.1), (1.8, 0.2), (0.0, 1.0)):
        case.top_k_weights = torch.tensor([weights], device=DEVICE, requires_grad=True)
        got[weights] = run(case)
    torch.testing.assert_close(got[0.9, 0.1]["dV"][0], 9 * got[0.9, 0.1]["dV"][1])
    torch.testing.assert_close(got[1.8, 0.2]["out"], 2 * got[0.9, 0.1]["out"])
    torch.testing.assert_close(got[1.8, 0.2]["dw"], got[0.9, 0.1]["dw"])
    assert (got[0.0, 1.0]["dV"][0] == 0).all()
    assert got[0.0, 1.0]["dw"][0, 0] != 0


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
