"""The expert passes held to a dense fp64 loop, gradient by gradient, and to every extreme of routing."""

from pathlib import Path

import dormouse_kernels
import pytest
import torch
from dormouse_kernels import Counters, glu_experts, latent_glu_experts, route
from dormouse_kernels.proof import oracle
from torch.utils.checkpoint import checkpoint

IMPLEMENTATIONS = ("reference", "padded")


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


def run(case, implementation="auto", **options):
    """Output and gradients by name."""
    out = latent_glu_experts(
        case.hidden_states, case.gate_up_proj, case.scale, case.v, case.top_k_index, case.top_k_weights,
        residual=case.residual, implementation=implementation, **options,
    )  # fmt: skip
    return gradients(out, case)


def run_oracle(case, capacity=None):
    out = oracle.latent_glu_experts(
        case.hidden_states, case.gate_up_proj, case.scale, case.v, case.top_k_index, case.top_k_weights,
        case.residual, capacity,
    )  # fmt: skip
    return gradients(out, case)


def gradients(out, case):
    leaves = case.leaves()
    grads = torch.autograd.grad(out, list(leaves.values()), case.grad.to(out.dtype), materialize_grads=True)
    return {"out": out.detach(), **{f"d {name}": grad for name, grad in zip(leaves, grads, strict=True)}}


def assert_close(got, want, tolerance=1e-12):
    assert got.keys() == want.keys()
    for name in got:
        torch.testing.assert_close(
            got[name].double(),
            want[name].double(),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, n=name: f"{n}: {text}",
        )


def assert_same_bits(got, want):
    assert got.keys() == want.keys()
    for name in got:
        assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("f", [1, 15, 16, 17, 37, 203, 5461])
@pytest.mark.parametrize(("r", "d"), [(16, 48), (3, 7)])
def test_value_and_every_gradient_equal_the_dense_loop(latent_case, implementation, f, r, d):
    case = latent_case(f=f, r=r, d=d)
    assert_close(run(case, implementation), run_oracle(case))


EXTREMES = {
    "every expert chosen by all": torch.arange(5).expand(11, 5),
    "no choice": torch.empty(4, 0, dtype=torch.int64),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_an_extreme_routing_equals_the_dense_loop(latent_case, implementation, name):
    index = EXTREMES[name]
    case = latent_case(T=index.shape[0], top_k_index=index)
    assert_close(run(case, implementation), run_oracle(case))


def test_a_thousand_experts_for_zipf_rows_equal_the_dense_loop(latent_case, implementation):
    odds = 1 / torch.arange(1, 1001, dtype=torch.float64) ** 1.5
    index = torch.multinomial(odds.expand(40, -1), 2, generator=torch.Generator().manual_seed(1))
    case = latent_case(T=40, E=1000, d=5, r=2, f=3, top_k_index=index)
    assert_close(run(case, implementation), run_oracle(case))


def test_experts_without_rows_get_exactly_zero_gradients_every_time(latent_case, implementation):
    index = torch.tensor([[0, 3]]).expand(11, 2)
    case = latent_case(top_k_index=index)
    want = run_oracle(case)
    for _ in range(3):
        got = run(case, implementation)
        assert_close(got, want)
        for name in ("d gate_up_proj", "d scale", "d v"):
            for expert in (1, 2, 4):
                idle = got[name][expert]
                assert torch.equal(idle.view(torch.int64), torch.zeros_like(idle).view(torch.int64)), name


def test_a_dropped_row_is_never_read(latent_case, implementation):
    case = latent_case(T=4, top_k_index=torch.tensor([[1], [1], [1], [0]]))
    want = run(case, implementation, capacity=2)
    with torch.no_grad():
        case.hidden_states[2] = torch.nan
        case.top_k_weights[2] = torch.inf
    assert_same_bits(run(case, implementation, capacity=2), want)


def test_nothing_hides_a_nan():
    root = Path(dormouse_kernels.__file__).parent
    assert [path.name for path in root.rglob("*.py") if "nan_to_num" in path.read_text()] == []


@pytest.mark.parametrize("capacity", [1, 2, 3, 100])
def test_over_capacity_the_first_rows_in_slot_order_are_kept_and_the_rest_counted(
    latent_case, implementation, capacity
):
    index = torch.tensor([[1, 0], [1, 2], [-1, 1], [1, 0], [0, 1], [1, 4]])
    case = latent_case(T=6, top_k_index=index)
    with Counters() as counters:
        got = run(case, implementation, capacity=capacity)
    assert_close(got, run_oracle(case, capacity))
    loads = [3, 6, 1, 0, 1]
    dropped = sum(max(load - capacity, 0) for load in loads)
    expected = {f"moe.latent_glu_experts/forward/{implementation}": 1, "moe.latent_glu_experts/forward/bad_index": 1}
    if dropped:
        expected["moe.latent_glu_experts/forward/dropped"] = dropped
    assert counters.snapshot() == expected


def test_pad_columns_are_exactly_zero_whatever_the_residual_and_the_upstream_hold(latent_case, implementation):
    case = latent_case(f=37)
    got = run(case, implementation)
    for name in ("out", "d residual"):
        assert got[name].shape[1] == 48
        assert got[name][:, 37:].eq(0).all(), name
    changed = case.to(torch.float64)
    with torch.no_grad():
        changed.residual[:, 37:] = torch.nan
    changed.grad[:, 37:] = torch.nan
    assert_same_bits(run(changed, implementation), got)


def test_a_routing_made_before_gives_the_same_bits(latent_case, implementation):
    case = latent_case()
    routing = route(case.top_k_index, 5)
    assert_same_bits(run(case, implementation, routing=routing), run(case, implementation))


def test_swapping_the_implementation_moves_fp32_by_rounding_only(latent_case):
    case = latent_case(T=300, d=128, r=64, f=203, E=16, dtype=torch.float32)
    assert_close(run(case, "padded"), run(case, "reference"), tolerance=2e-4)


def test_sums_over_four_thousand_rows_do_not_stall_in_bf16(implementation):
    T, r = 4096, 16
    hidden = torch.ones(T, 16, dtype=torch.bfloat16)
    gate_up = torch.full((1, 2 * r, 16), 1 / 16, dtype=torch.bfloat16)
    scale = torch.ones(1, 2 * r, dtype=torch.bfloat16, requires_grad=True)
    v = torch.eye(r, dtype=torch.bfloat16).unsqueeze(0).requires_grad_()
    index = torch.zeros(T, 1, dtype=torch.int64)
    weights = torch.ones(T, 1)
    out = latent_glu_experts(hidden, gate_up, scale, v, index, weights, implementation=implementation)
    grad_scale, grad_v = torch.autograd.grad(out, (scale, v), torch.full_like(out, 1 / T))
    # p = q = 1: d s' = Σ silu(1)/T and d s = Σ (silu(1) + σ(1)(1 − σ(1)))/T, 4096 equal terms each
    sigmoid = torch.sigmoid(torch.tensor(1.0)).item()
    assert grad_scale[0, r:].float() == pytest.approx(sigmoid, abs=1 / 256)
    assert grad_scale[0, :r].float() == pytest.approx(sigmoid + sigmoid * (1 - sigmoid), abs=1 / 256)
    assert grad_v.float() == pytest.approx(sigmoid, abs=1 / 256)


def test_equal_rows_combine_to_themselves_at_half_weights(latent_case, implementation):
    case = latent_case(E=1, dtype=torch.bfloat16)
    arguments = case.hidden_states, case.gate_up_proj, case.scale, case.v
    one = latent_glu_experts(
        *arguments, torch.zeros(11, 1, dtype=torch.int64), torch.ones(11, 1), implementation=implementation
    )
    two = latent_glu_experts(
        *arguments, torch.zeros(11, 2, dtype=torch.int64), torch.full((11, 2), 0.5), implementation=implementation
    )
    assert torch.equal(one, two)


def test_the_weight_of_a_slot_scales_its_expert_once(latent_case, implementation):
    case = latent_case(T=1, E=2, top_k_index=torch.tensor([[0, 1]]))
    with torch.no_grad():
        for bank in (case.gate_up_proj, case.scale, case.v):
            bank[1] = bank[0]
        case.top_k_weights.copy_(torch.tensor([[0.9, 0.1]]))
        case.residual.zero_()
    first = run(case, implementation)
    torch.testing.assert_close(first["d v"][0], 9 * first["d v"][1])
    with torch.no_grad():
        case.top_k_weights.mul_(2)
    second = run(case, implementation)
    torch.testing.assert_close(second["out"], 2 * first["out"])
    assert torch.equal(second["d top_k_weights"], first["d top_k_weights"])


def test_a_weight_of_zero_still_has_a_gradient(latent_case, implementation):
    case = latent_case(T=1, E=2, top_k_index=torch.tensor([[0, 1]]))
    with torch.no_grad():
        case.top_k_weights.copy_(torch.tensor([[0.0, 1.0]]))
    got = run(case, implementation)
    assert got["d v"][0].eq(0).all()
    assert got["d gate_up_proj"][0].eq(0).all()
    assert got["d top_k_weights"][0, 0] != 0


def test_a_bf16_bank_under_fp32_tokens_computes_in_fp32(latent_case, implementation):
    case = latent_case(dtype=torch.float32)
    for name in ("gate_up_proj", "v"):
        setattr(case, name, getattr(case, name).detach().bfloat16().requires_grad_())
    got = run(case, implementation)
    assert got["out"].dtype == torch.float32
    for name, leaf in case.leaves().items():
        assert got[f"d {name}"].dtype == leaf.dtype, name
    want = run_oracle(case)
    for name in ("d gate_up_proj", "d v"):
        assert_close({name: got.pop(name)}, {name: want.pop(name)}, tolerance=8e-3)
    assert_close(got, want, tolerance=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_within_its_rounding_of_the_oracle(latent_case, implementation, dtype):
    case = latent_case(T=64, d=64, r=16, f=48, E=4, dtype=dtype)
    got = run(case, implementation)
    want = run_oracle(case)
    for name in got:
        assert got[name].dtype == dtype, name
        error = (got[name].double() - want[name]).norm() / want[name].norm()
        assert error < 1e-2, f"{name}: {error}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_reference_in_low_precision_is_the_fp32_pass_rounded_once(latent_case, dtype):
    case = latent_case(T=64, d=64, r=16, f=48, E=4, k=3, dtype=dtype)
    want = run(case.to(torch.float32), "reference")
    got = run(case, "reference")
    assert_same_bits(got, {name: tensor.to(dtype) for name, tensor in want.items()})


def test_under_autocast_the_operands_are_cast_and_gradients_keep_their_dtype(latent_case, implementation):
    case = latent_case(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(case, implementation)
    cast = case.to(torch.float32)
    for name in ("hidden_states", "gate_up_proj", "v"):
        setattr(cast, name, getattr(cast, name).detach().bfloat16().requires_grad_())
    want = run(cast, implementation)
    assert got["out"].dtype == torch.bfloat16
    assert torch.equal(got["out"], want["out"])
    for name in case.leaves():
        assert got[f"d {name}"].dtype == torch.float32, name
        assert torch.equal(got[f"d {name}"], want[f"d {name}"].float()), name


def test_nothing_as_wide_as_the_output_is_saved(latent_case, implementation):
    case = latent_case(T=64, d=8, r=4, f=160, E=4)
    saved = []

    def keep(tensor):
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        latent_glu_experts(
            case.hidden_states, case.gate_up_proj, case.scale, case.v, case.top_k_index, case.top_k_weights,
            residual=case.residual, implementation=implementation,
        )  # fmt: skip
    assert tuple(case.v.shape) in saved
    assert [shape for shape in saved if 160 in shape and shape != tuple(case.v.shape)] == []


@pytest.mark.parametrize("name", ["hidden_states", "gate_up_proj", "scale", "v", "top_k_weights", "residual"])
def test_one_gradient_alone_is_the_same_as_among_all(latent_case, implementation, name):
    case = latent_case()
    want = run(case, implementation)[f"d {name}"]
    alone = case.to(torch.float64)
    for other, leaf in alone.leaves().items():
        leaf.requires_grad_(other == name)
    out = latent_glu_experts(
        alone.hidden_states, alone.gate_up_proj, alone.scale, alone.v, alone.top_k_index, alone.top_k_weights,
        residual=alone.residual, implementation=implementation,
    )  # fmt: skip
    (got,) = torch.autograd.grad(out, [getattr(alone, name)], case.grad)
    assert torch.equal(got, want)


def test_a_checkpointed_pass_recomputes_the_same_bits_and_counts_them_apart(latent_case, implementation):
    case = latent_case(dtype=torch.float32)
    want = run(case, implementation)
    routing = route(case.top_k_index, 5)

    def expert_pass(hidden_states):
        return latent_glu_experts(
            hidden_states, case.gate_up_proj, case.scale, case.v, case.top_k_index, case.top_k_weights,
            residual=case.residual, routing=routing, implementation=implementation,
        )  # fmt: skip

    with Counters() as counters:
        out = checkpoint(
            expert_pass,
            case.hidden_states,
            use_reentrant=False,
            context_fn=lambda: (counters.phase("forward"), counters.phase("recompute")),
        )
    assert_same_bits(gradients(out, case), want)
    assert counters.snapshot() == {
        f"moe.latent_glu_experts/forward/{implementation}": 1,
        f"moe.latent_glu_experts/recompute/{implementation}": 1,
    }


def test_bad_indices_are_refused_only_when_asked(latent_case, implementation):
    case = latent_case(T=2, top_k_index=torch.tensor([[0, 5], [-1, 1]]))
    run(case, implementation)
    with pytest.raises(ValueError, match=r"latent_glu_experts: top_k_index holds 2 indices outside 0\.\.4; mend them"):
        run(case, implementation, check_indices=True)
    case.top_k_index = torch.tensor([[0, 4], [2, 1]])
    run(case, implementation, check_indices=True)


def glu_arguments(dtype=torch.float64, T=11, D=12, inner=7, E=5, k=2):
    generator = torch.Generator().manual_seed(3)
    shapes = ((T, D), (E, 2 * inner, D), (E, D, inner), (T, k), (T, D))
    tensors = [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    index = torch.rand(T, E, generator=generator).argsort(dim=1)[:, :k]
    index[0, 0], index[3, 1] = -1, E
    return [tensor.requires_grad_() for tensor in tensors[:4]], index, tensors[4]


@pytest.mark.parametrize("capacity", [None, 2])
def test_swiglu_experts_equal_the_dense_loop(implementation, capacity):
    (hidden, gate_up, down, weights), index, grad = glu_arguments()
    leaves = (hidden, gate_up, down, weights)
    with Counters() as counters:
        got = glu_experts(hidden, gate_up, down, index, weights, capacity=capacity, implementation=implementation)
    want = oracle.glu_experts(hidden, gate_up, down, index, weights, capacity)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for name, ours, theirs in zip(
        ("hidden_states", "gate_up_proj", "down_proj", "top_k_weights"),
        torch.autograd.grad(got, leaves, grad),
        torch.autograd.grad(want, leaves, grad),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")
    assert counters.snapshot()[f"moe.glu_experts/forward/{implementation}"] == 1


def test_swiglu_experts_are_latent_experts_without_scales(implementation):
    (hidden, gate_up, down, weights), index, _ = glu_arguments(D=16)
    plain = glu_experts(hidden, gate_up, down, index, weights, implementation=implementation)
    latent = latent_glu_experts(hidden, gate_up, torch.ones(5, 14), down, index, weights, implementation=implementation)
    assert torch.equal(plain, latent)


def test_a_module_for_each_implementation_runs_that_one(latent_case):
    case = latent_case()
    arguments = case.hidden_states, case.gate_up_proj, case.scale, case.v, case.top_k_index, case.top_k_weights
    (hidden, gate_up, down, weights), index, _ = glu_arguments()
    for implementation in IMPLEMENTATIONS:
        module = getattr(dormouse_kernels, implementation)
        with Counters() as counters:
            module.latent_glu_experts(*arguments, residual=case.residual)
            module.glu_experts(hidden, gate_up, down, index, weights)
        assert {key for key in counters.snapshot() if not key.endswith("bad_index")} == {
            f"moe.latent_glu_experts/forward/{implementation}",
            f"moe.glu_experts/forward/{implementation}",
        }
