"""The ops under `torch.compile` and torch's own checks of what was registered."""

import pytest
import torch
from dormouse_kernels import Counters, glu_experts, latent_glu_experts, route
from dormouse_kernels.moe import library
from dormouse_kernels.moe.passes import Operands

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = ("reference", "padded", "triton")


def operands_of(case):
    return Operands(
        case.hidden_states, case.gate_up_proj, case.scale, case.v, case.top_k_weights, case.residual
    )  # fmt: skip


def arguments_of(case, implementation, width=48, scale=True, tile_rows=0):
    operands = operands_of(case)
    if not scale:
        operands = operands._replace(scale=None, residual=None)
    routing = route(case.top_k_index, 5)
    packed = library.pack(routing)[:4]
    return ("latent_glu_experts", *operands, case.top_k_index, packed, tile_rows, width, None, implementation, "", [])


@pytest.fixture
def fp32_case(latent_case):
    return latent_case(dtype=torch.float32).to(torch.float32, DEVICE)


@pytest.fixture
def no_poison(poison):
    """Dynamo and opcheck compare whole buffers, and use operations that have no deterministic form."""
    torch.set_deterministic_debug_mode("default")


@pytest.mark.usefixtures("no_poison")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_registered_pass_is_what_torch_expects(fp32_case, implementation):
    torch.library.opcheck(library.expert_pass, arguments_of(fp32_case, implementation))


@pytest.mark.usefixtures("no_poison")
def test_the_registered_sort_is_what_torch_expects(fp32_case):
    torch.library.opcheck(library.sort, (fp32_case.top_k_index, 5, 16))


@pytest.mark.usefixtures("no_poison")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[: 3 if DEVICE == "cuda" else 2])
def test_a_compiled_latent_pass_has_no_break_and_the_eager_values_and_gradients(fp32_case, implementation):
    case = fp32_case

    def run(*leaves):
        x, gate_up, scale, v, weights, residual = leaves
        return latent_glu_experts(
            x * 1.5, gate_up, scale, v, case.top_k_index, weights, residual=residual, implementation=implementation
        ).square()  # fmt: skip

    assert_compiles(run, list(case.leaves().values()))


@pytest.mark.usefixtures("no_poison")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[: 3 if DEVICE == "cuda" else 2])
def test_a_compiled_swiglu_pass_has_no_break_and_the_eager_values_and_gradients(implementation):
    generator = torch.Generator().manual_seed(0)
    shapes = ((11, 48), (5, 64, 48), (5, 48, 32), (11, 2))
    leaves = [torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for shape in shapes]
    index = torch.rand(11, 5, generator=generator).topk(2).indices.to(DEVICE)

    def run(x, gate_up, down, weights):
        routing = route(index, 5)
        return glu_experts(x, gate_up, down, index, weights, routing=routing, implementation=implementation).square()

    assert_compiles(run, leaves)


def assert_compiles(run, leaves):
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with Counters() as eager_counters:
        want = run(*leaves)
    with Counters() as counters:
        got = compiled(*leaves)
    assert counters.snapshot() == eager_counters.snapshot()
    torch.testing.assert_close(got, want)
    wants = torch.autograd.grad(want.sum(), leaves)
    for place, (gradient, wanted) in enumerate(zip(torch.autograd.grad(got.sum(), leaves), wants, strict=True)):
        torch.testing.assert_close(gradient, wanted, msg=lambda text, place=place: f"gradient {place}: {text}")
