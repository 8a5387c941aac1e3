"""Rows of the parity table for the Triton kernels of the latent expert pass, each tensor and each expert by itself."""

import pytest
import torch
from dormouse_kernels import dependents, latent_glu_experts
from dormouse_kernels.moe.latent import backward, forward, turns
from dormouse_kernels.proof import oracle, relative_errors

KERNELS = (
    dependents.after_previous,
    turns.take_ticket, turns.program_barrier, turns.wait_for, turns.row_turns, turns.residual_of, turns.store_in_turn,
    forward.read_tile, forward.latent_rows, forward.expand_rows, forward.sum_slots,
    backward.store_gradient, backward.grad_v_rows, backward.grad_v_piece, backward.latent_gradients,
    backward.grad_scale, backward.grad_u_rows, backward.long_grad_v, backward.long_grad_u,
)  # fmt: skip
S0 = {"T": 40, "d": 48, "r": 16, "f": 37, "E": 5}
S1 = {"T": 300, "d": 128, "r": 64, "f": 203, "E": 16}
BOUNDS = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 1e-2}
CASES = [
    pytest.param("interpreter", S0, torch.float32),
    pytest.param("interpreter", S0, torch.float16),
    pytest.param("gpu", S0, torch.float32, marks=pytest.mark.gpu),
    pytest.param("gpu", S1, torch.float32, marks=pytest.mark.gpu),
    pytest.param("gpu", S1, torch.bfloat16, marks=pytest.mark.gpu),
]


def tensors(out, case):
    grads = torch.autograd.grad(out, list(case.leaves().values()), case.grad.to(out.device, out.dtype))
    return dict(zip(("out", "dx", "dU", "ds", "dV", "dw", "dres"), (out, *grads), strict=True))


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(("level", "sizes", "dtype"), CASES)
def test_the_triton_pass_against_the_fp64_dense_loop(proof, latent_case, level, sizes, dtype, k):
    case = latent_case(**sizes, k=k, dtype=dtype)

    def measure(device):
        moved = case.to(dtype, device)
        moved.top_k_index = case.top_k_index.to(device)
        out = latent_glu_experts(
            moved.hidden_states, moved.gate_up_proj, moved.scale, moved.v, moved.top_k_index, moved.top_k_weights,
            residual=moved.residual, implementation="triton",
        )  # fmt: skip
        want = oracle.latent_glu_experts(
            case.hidden_states, case.gate_up_proj, case.scale, case.v, case.top_k_index, case.top_k_weights,
            case.residual,
        )  # fmt: skip
        return relative_errors(tensors(out, moved), tensors(want, case), by_expert=("dU", "ds", "dV"))

    shape = " ".join(f"{letter} {size}" for letter, size in {**sizes, "k": k}.items())
    proof.parity(
        "latent_glu_experts triton / dense loop", shape, dtype, level,
        bound=BOUNDS[dtype], measure=measure, kernels=KERNELS,
    )  # fmt: skip
