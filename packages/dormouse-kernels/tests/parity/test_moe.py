"""Rows of the parity table for the expert passes: plain torch today, each tensor and each expert by itself."""

import pytest
import torch
from dormouse_kernels import glu_experts, latent_glu_experts
from dormouse_kernels.proof import oracle, relative_errors

SHAPES = {
    "T 11 d 48 r 16 f 37 E 5 k 2": {},
    "T 300 d 128 r 64 f 203 E 16 k 2": {"T": 300, "d": 128, "r": 64, "f": 203, "E": 16},
}
# rounding of one matrix product and of one sum over an expert's rows, with room for three of each in a row
BOUNDS = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1e-2}
BY_EXPERT = ("dU", "ds", "dV")
LETTERS = {
    "hidden_states": "dx", "gate_up_proj": "dU", "scale": "ds", "v": "dV", "down_proj": "dV", "top_k_weights": "dw",
    "residual": "dres",
}  # fmt: skip


def tensors(out, leaves, grad):
    grads = torch.autograd.grad(out, list(leaves.values()), grad.to(out.device, out.dtype))
    return {"out": out, **{LETTERS[name]: gradient for name, gradient in zip(leaves, grads, strict=True)}}


def latent(case, implementation, device):
    moved = case.to(case.hidden_states.dtype, device)
    out = latent_glu_experts(
        moved.hidden_states, moved.gate_up_proj, moved.scale, moved.v, moved.top_k_index, moved.top_k_weights,
        residual=moved.residual, implementation=implementation,
    )  # fmt: skip
    return tensors(out, moved.leaves(), moved.grad)


def latent_oracle(case):
    out = oracle.latent_glu_experts(
        case.hidden_states, case.gate_up_proj, case.scale, case.v, case.top_k_index, case.top_k_weights, case.residual
    )
    return tensors(out, case.leaves(), case.grad)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("implementation", ["reference", "padded"])
@pytest.mark.parametrize("level", ["reference", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_latent_glu_experts_against_the_fp64_dense_loop(proof, latent_case, shape, dtype, implementation, level):
    case = latent_case(**SHAPES[shape], dtype=dtype)
    proof.parity(
        f"latent_glu_experts {implementation} / dense loop",
        shape,
        dtype,
        level,
        bound=BOUNDS[dtype],
        measure=lambda device: relative_errors(
            latent(case, implementation, device), latent_oracle(case), by_expert=BY_EXPERT
        ),
    )


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("level", ["reference", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_latent_glu_experts_padded_against_reference(proof, latent_case, dtype, level):
    (shape, sizes) = list(SHAPES.items())[1]
    case = latent_case(**sizes, dtype=dtype)
    proof.parity(
        "latent_glu_experts padded / reference",
        shape,
        dtype,
        level,
        bound=BOUNDS[dtype],
        measure=lambda device: relative_errors(
            latent(case, "padded", device), latent(case, "reference", device), by_expert=BY_EXPERT
        ),
    )


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("implementation", ["reference", "padded"])
@pytest.mark.parametrize("level", ["reference", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_glu_experts_against_the_fp64_dense_loop(proof, dtype, implementation, level):
    T, D, inner, E, k = 300, 64, 48, 16, 2
    generator = torch.Generator().manual_seed(2)
    index = torch.rand(T, E, generator=generator).argsort(dim=1)[:, :k]
    shapes = {
        "hidden_states": (T, D), "gate_up_proj": (E, 2 * inner, D), "down_proj": (E, D, inner),
        "top_k_weights": (T, k), "grad": (T, D),
    }  # fmt: skip
    drawn = {
        name: (torch.randn(*size, generator=generator) * size[-1] ** (-0.5 if len(size) == 3 else 0)).to(dtype)
        for name, size in shapes.items()
    }
    grad = drawn.pop("grad")

    def run(experts, device, **options):
        leaves = {name: tensor.to(device, copy=True).requires_grad_() for name, tensor in drawn.items()}
        arguments = leaves["hidden_states"], leaves["gate_up_proj"], leaves["down_proj"]
        return tensors(experts(*arguments, index.to(device), leaves["top_k_weights"], **options), leaves, grad)

    proof.parity(
        f"glu_experts {implementation} / dense loop",
        f"T {T} D {D} I {inner} E {E} k {k}",
        dtype,
        level,
        bound=BOUNDS[dtype],
        measure=lambda device: relative_errors(
            run(glu_experts, device, implementation=implementation), run(oracle.glu_experts, "cpu"), by_expert=BY_EXPERT
        ),
    )
