"""Rows of the parity table for the grouped Triton kernels, each tensor and each expert by itself."""

import pytest
import torch
from dormouse_kernels import glu_experts, grouped_mm, grouped_wgrad, route
from dormouse_kernels.moe.grouped import backward, forward
from dormouse_kernels.proof import oracle, relative_errors

SHARED = (
    forward.place_of, forward.source_of, forward.contract, forward.multiply_tile, forward.zero_tile,
    forward.multiply_rows, backward.bank_gradients,
)  # fmt: skip
GLU = (
    forward.is_idle, forward.halves, forward.store_gated, forward.gated_tile, forward.gated_rows,
    backward.through_gate, backward.gate_tile, backward.gate_gradients, backward.sum_parts,
)  # fmt: skip
S0 = {"T": 40, "D": 33, "I": 21, "E": 5, "k": 3}
S1 = {"T": 300, "D": 128, "I": 96, "E": 6, "k": 2}
S2 = {"T": 1024, "D": 256, "I": 512, "E": 4, "k": 2}
BOUNDS = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 1e-2}
CASES = [
    pytest.param("interpreter", S0, torch.float32),
    pytest.param("interpreter", S0, torch.float16),
    *(
        pytest.param("gpu", sizes, dtype, marks=pytest.mark.gpu)
        for sizes in (S0, S1, S2)
        for dtype in (torch.float32, torch.bfloat16)
    ),
]


def drawn(dtype, **shapes):
    generator = torch.Generator().manual_seed(3)
    return {
        name: (torch.randn(*shape, generator=generator) * shape[-1] ** (-0.5 if len(shape) == 3 else 0)).to(dtype)
        for name, shape in shapes.items()
    }


def index_of(T, E, k):
    """From -1 to E: some indices are sentinels."""
    return torch.randint(-1, E + 1, (T, k), generator=torch.Generator().manual_seed(4))


def letters(sizes):
    return " ".join(f"{letter} {size}" for letter, size in sizes.items())


@pytest.mark.parametrize(("level", "sizes", "dtype"), CASES)
def test_glu_experts_triton_against_the_fp64_dense_loop(proof, level, sizes, dtype):
    T, D, inner, E, k = sizes.values()
    index = index_of(T, E, k)
    tensors = drawn(dtype, x=(T, D), up=(E, 2 * inner, D), down=(E, D, inner), weights=(T, k), grad=(T, D))
    grad = tensors.pop("grad")

    def run(experts, device, **options):
        x, up, down, weights = leaves = [t.to(device, copy=True).requires_grad_() for t in tensors.values()]
        out = experts(x, up, down, index.to(device), weights, **options)
        grads = torch.autograd.grad(out, leaves, grad.to(device, out.dtype))
        return dict(zip(("out", "dx", "dU", "dD", "dw"), (out, *grads), strict=True))

    proof.parity(
        "glu_experts triton / dense loop", letters(sizes), dtype, level, bound=BOUNDS[dtype], kernels=(*SHARED, *GLU),
        measure=lambda device: relative_errors(
            run(glu_experts, device, implementation="triton"), run(oracle.glu_experts, "cpu"), by_expert=("dU", "dD")
        ),
    )  # fmt: skip


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("level", "sizes", "dtype"), CASES)
def test_grouped_products_triton_against_the_reference(proof, level, sizes, dtype, gather, transposed):
    T, K, N, E, k = sizes.values()
    index = index_of(T, E, k)
    tensors = drawn(dtype, a=(T if gather else T * k, K), b=(E, N, K) if transposed else (E, K, N), g=(T * k, N))

    def run(device, dtype, implementation):
        a, b, g = (tensor.to(device, dtype, copy=True) for tensor in tensors.values())
        routing = route(index.to(device), E)
        options = {"gather": gather, "scatter": not gather, "implementation": implementation}
        into = torch.ones(E, K, N, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=device)
        grouped_wgrad(a, g, routing, out=into, accumulate=True, **options)
        out = grouped_mm(
            a.requires_grad_(), b.requires_grad_().mT if transposed else b.requires_grad_(), routing, **options
        )
        return dict(zip(("out", "da", "db", "into"), (out, *torch.autograd.grad(out, (a, b), g), into), strict=True))

    name = f"{letters(sizes)}{' gather' if gather else ' scatter'}{' b.mT' if transposed else ''}"
    proof.parity(
        "grouped_mm, grouped_wgrad triton / reference", name, dtype, level, bound=BOUNDS[dtype], kernels=SHARED,
        measure=lambda device: relative_errors(
            run(device, dtype, "triton"), run("cpu", torch.float64, "reference"), by_expert=("db", "into")
        ),
    )  # fmt: skip
