"""The grouped products under `torch.compile`, and torch's own checks of what was registered."""

import pytest
import torch
from dormouse_kernels import Counters, grouped_mm, grouped_wgrad, route
from dormouse_kernels.moe.grouped import library
from dormouse_kernels.moe.library import pack

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INDEX = torch.tensor([[0, 2], [1, -1], [2, 0], [2, 1]])
OPS = {"mm": (library.mm, (3, 6, 5)), "wgrad": (library.wgrad, (8, 5))}
pytestmark = pytest.mark.usefixtures("no_poison")


@pytest.fixture
def no_poison(poison):
    """Dynamo and opcheck compare whole buffers, and use operations that have no deterministic form."""
    torch.set_deterministic_debug_mode("default")


def leaves_of(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("name", OPS)
def test_the_registered_products_are_what_torch_expects(name, implementation, moved):
    registered, second = OPS[name]
    index = INDEX.to(DEVICE)
    left, right = leaves_of((4 if moved else 8, 6), second)
    options = moved, moved, implementation, ""
    torch.library.opcheck(registered, (left, right, index, pack(route(index, 3))[:4], 0, *options))


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_the_registered_sum_into_a_gradient_is_what_torch_expects(implementation):
    index = INDEX.to(DEVICE)
    a, g, out = (leaf.detach() for leaf in leaves_of((8, 6), (8, 5), (3, 6, 5)))
    options = False, False, True, implementation, ""
    torch.library.opcheck(library.wgrad_into, (a, g, out, index, pack(route(index, 3))[:4], 0, *options))


# off CUDA the op asks Triton whether it interprets, which Dynamo cannot trace
@pytest.mark.parametrize("implementation", ["reference", "triton"][: 2 if DEVICE == "cuda" else 1])
def test_compiled_products_have_no_break_and_the_eager_values_and_gradients(implementation):
    index = INDEX.to(DEVICE)
    leaves = leaves_of((4, 6), (3, 6, 5), (3, 7, 5))

    def run(x, w_in, w_out):
        routing = route(index, 3)
        options = {"implementation": implementation}
        hidden = grouped_mm(x * 1.5, w_in, routing, gather=True, **options).relu()
        rows = grouped_mm(hidden, w_out.mT, routing, scatter=True, **options)
        total = torch.zeros(3, 5, 7, device=rows.device)
        grouped_wgrad(hidden.detach(), rows.detach(), routing, scatter=True, out=total, accumulate=True, **options)
        made = grouped_wgrad(hidden, rows, routing, scatter=True, **options)
        return rows, made.square().sum() + total.sum()

    torch._dynamo.reset()
    with Counters() as eager:
        want = run(*leaves)
    with Counters() as compiled:
        got = torch.compile(run, fullgraph=True, backend="aot_eager")(*leaves)
    assert compiled.snapshot() == eager.snapshot()
    torch.testing.assert_close(got, want)
    wants = torch.autograd.grad(want[0].sum() + want[1], leaves)
    gots = torch.autograd.grad(got[0].sum() + got[1], leaves)
    for name, gradient, wanted in zip(("dx", "dw_in", "dw_out"), gots, wants, strict=True):
        torch.testing.assert_close(gradient, wanted, msg=lambda text, name=name: f"{name}: {text}")
