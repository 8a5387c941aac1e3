"""`grouped_mm` and `grouped_wgrad`: the Triton kernels against the reference in fp64, and the reference by itself."""

import pytest
import torch
from dormouse_kernels import Counters, grouped_mm, grouped_wgrad, route
from dormouse_kernels.proof import relative_errors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOOLEANS = (False, True)


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def routing_of(T=12, E=3, k=2, seed=0):
    # from -1 to E: some are sentinels
    return route(torch.randint(-1, E + 1, (T, k), generator=torch.Generator().manual_seed(seed)).to(DEVICE), E)


def operands(routing, K, N, gather, dtype=torch.float32):
    slots = routing.order.numel()
    rows = routing.top_k_index.shape[0] if gather else slots
    a, b, g = draw(rows, K), draw(routing.num_experts, K, N, seed=1), draw(slots, N, seed=2)
    return a.to(dtype), b.to(dtype), g.to(dtype)


def product(a, b, g, routing, implementation, **options):
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    out = grouped_mm(a, b, routing, implementation=implementation, **options)
    da, db = torch.autograd.grad(out, (a, b), g)
    return {"out": out.detach(), "da": da, "db": db}


def assert_near(got, want, bound=3e-6, by_expert=("db",)):
    errors = relative_errors(got, want, by_expert=by_expert)
    assert all(error <= bound for error in errors.values()), errors


@pytest.mark.parametrize(("K", "N"), [(32, 16), (33, 45), (1, 1), (16, 7)])
@pytest.mark.parametrize("gather", BOOLEANS)
@pytest.mark.parametrize("scatter", BOOLEANS)
def test_the_kernels_equal_the_reference_in_fp64(K, N, gather, scatter):
    routing = routing_of()
    rows = operands(routing, K, N, gather)
    got = product(*rows, routing, "triton", gather=gather, scatter=scatter)
    want = product(*(each.double() for each in rows), routing, "reference", gather=gather, scatter=scatter)
    assert_near(got, want)


@pytest.mark.parametrize("gather", BOOLEANS)
@pytest.mark.parametrize("scatter", BOOLEANS)
def test_the_reference_is_a_product_a_row(gather, scatter):
    routing = routing_of()
    a, b, _ = operands(routing, 5, 4, gather, torch.float64)
    out = grouped_mm(a, b, routing, gather=gather, scatter=scatter, implementation="reference")
    experts = routing.top_k_index.flatten().tolist()
    for row, slot in enumerate(routing.order.tolist()):
        expert = experts[slot]
        source = a[slot // 2] if gather else a[row]
        want = source @ b[expert] if 0 <= expert < 3 else torch.zeros_like(out[0])
        torch.testing.assert_close(out[slot if scatter else row], want)


@pytest.mark.parametrize("gather", BOOLEANS)
@pytest.mark.parametrize("scatter", BOOLEANS)
def test_the_references_gradients_are_those_of_finite_differences(gather, scatter):
    routing = routing_of(T=4)
    a, b, g = (each.requires_grad_() for each in operands(routing, 3, 2, gather, torch.float64))

    def multiply(a, b):
        return grouped_mm(a, b, routing, gather=gather, scatter=scatter, implementation="reference")

    def wgrad(a, g):
        return grouped_wgrad(a, g, routing, gather=gather, scatter=scatter, implementation="reference")

    assert torch.autograd.gradcheck(multiply, (a, b))
    assert torch.autograd.gradcheck(wgrad, (a, g))


STRIDES = {
    "a weight of Hugging Face's layout": lambda b: b.mT.contiguous().mT,
    "every second column": lambda b: torch.stack([b, b], -1).flatten(2)[..., ::2],
    "experts innermost": lambda b: b.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "one matrix for all experts": lambda b: b[:1].expand_as(b),
}


@pytest.mark.parametrize("strides", STRIDES)
def test_any_strides_of_b_give_the_bits_of_a_contiguous_one(strides):
    routing = routing_of()
    a, b, g = operands(routing, 17, 18, gather=False)
    strided = STRIDES[strides](b)
    assert not strided.is_contiguous()
    got = product(a, strided, g, routing, "triton")
    want = product(a, strided.contiguous(), g, routing, "triton")
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


def test_rows_and_upstream_gradients_of_any_strides_give_the_same_bits():
    routing = routing_of()
    a, b, g = operands(routing, 17, 18, gather=True)
    g = g[:, :1].expand_as(g)
    options = {"gather": True, "scatter": True}
    want = product(a, b, g.contiguous(), routing, "triton", **options)
    got = product(a.T.contiguous().T, b, g, routing, "triton", **options)
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("T", [0, 1])
def test_no_rows_and_one_row_give_zeros_to_idle_experts(T):
    routing = route(torch.full((T, 1), 2, device=DEVICE), 3)
    a, b, g = operands(routing, 5, 4, gather=True)
    got = product(a, b, g, routing, "triton", gather=True)
    assert got["out"].shape == (T, 4)
    busy = routing.counts > 0
    assert (got["db"][~busy] == 0).all()
    assert (got["db"][busy] != 0).all()


def test_fp16_is_within_its_rounding_of_the_reference():
    routing = routing_of(T=20)
    rows = operands(routing, 48, 33, gather=True, dtype=torch.float16)
    options = {"gather": True, "scatter": True}
    want = product(*(each.double() for each in rows), routing, "reference", **options)
    assert_near(product(*rows, routing, "triton", **options), want, bound=2e-3)


def test_mixed_operands_are_promoted_and_gradients_return_in_each_ones_dtype():
    routing = routing_of()
    a, b, g = operands(routing, 17, 18, gather=False)
    got = product(a, b.half(), g, routing, "triton")
    assert {name: tensor.dtype for name, tensor in got.items()} == {
        "out": torch.float32, "da": torch.float32, "db": torch.float16,
    }  # fmt: skip
    narrow = product(a.half(), b, g, routing, "triton")
    assert narrow["da"].dtype == torch.float16
    want = product(a.half().double(), b.double(), g.double(), routing, "reference")
    assert_near({"out": narrow["out"], "db": narrow["db"]}, {"out": want["out"], "db": want["db"]})


@pytest.mark.parametrize("gather", BOOLEANS)
@pytest.mark.parametrize("scatter", BOOLEANS)
def test_grouped_wgrad_is_the_gradient_of_b(gather, scatter):
    routing = routing_of()
    a, b, g = operands(routing, 33, 18, gather)
    want = product(a, b, g, routing, "triton", gather=gather, scatter=scatter)["db"]
    assert torch.equal(grouped_wgrad(a, g, routing, gather=gather, scatter=scatter, implementation="triton"), want)


@pytest.mark.parametrize("gather", BOOLEANS)
@pytest.mark.parametrize("scatter", BOOLEANS)
def test_grouped_wgrads_own_gradients_equal_the_references(gather, scatter):
    routing = routing_of()
    a, b, g = operands(routing, 9, 18, gather)

    def gradients(a, g, upstream, implementation):
        a, g = a.detach().requires_grad_(), g.detach().requires_grad_()
        out = grouped_wgrad(a, g, routing, gather=gather, scatter=scatter, implementation=implementation)
        return dict(zip(("da", "dg"), torch.autograd.grad(out, (a, g), upstream), strict=True))

    want = gradients(a.double(), g.double(), b.double(), "reference")
    assert_near(gradients(a, g, b, "triton"), want, by_expert=())


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_out_is_written_once_or_added_to_and_rounded_once(implementation, dtype):
    routing = routing_of()
    a, _, g = operands(routing, 9, 18, gather=False)
    want = grouped_wgrad(a.double(), g.double(), routing, implementation="reference")
    # a transposed view: strides are the caller's
    out = torch.full((3, 18, 9), torch.nan, dtype=dtype, device=DEVICE).mT
    returned = grouped_wgrad(a, g, routing, out=out, implementation=implementation)
    assert returned is out
    bound = 3e-6 if dtype == torch.float32 else 1e-3
    assert_near({"out": out}, {"out": want}, bound)
    start = draw(3, 9, 18, seed=5).to(dtype)
    total = start.clone()
    grouped_wgrad(a, g, routing, out=total, accumulate=True, implementation=implementation)
    assert_near({"out": total}, {"out": start.double() + want}, bound)


def test_calls_are_counted_and_auto_is_the_devices():
    routing = routing_of()
    a, b, g = operands(routing, 4, 3, gather=False)
    with Counters() as counters:
        grouped_mm(a, b, routing)
        grouped_wgrad(a, g, routing)
    chosen = "triton" if DEVICE == "cuda" else "reference"
    bad = int(routing.bad_indices())
    assert counters.snapshot() == {
        f"moe.{op}/forward/{key}": n
        for op in ("grouped_mm", "grouped_wgrad")
        for key, n in ((chosen, 1), ("bad_index", bad))
    }


REFUSED = {
    "grouped_mm: a has shape": lambda a, b, g, r: grouped_mm(a[:-1], b, r),
    "grouped_mm: b has shape .*; pass \\[E, K, N\\]": lambda a, b, g, r: grouped_mm(a, b[0], r),
    "grouped_mm: a has 4 columns but b is \\[3, 3, 3\\]": lambda a, b, g, r: grouped_mm(a, b[:, :3], r),
    "grouped_mm: routing is of 3 experts but b holds 2": lambda a, b, g, r: grouped_mm(a, b[:2], r),
    "grouped_mm: implementation is 'padded'": lambda a, b, g, r: grouped_mm(a, b, r, implementation="padded"),
    "grouped_mm: implementation='triton' cannot take torch.float64": lambda a, b, g, r: grouped_mm(
        a.double(), b.double(), r, implementation="triton"
    ),
    "grouped_wgrad: g has shape": lambda a, b, g, r: grouped_wgrad(a, g[:-1], r),
    "grouped_wgrad: out has shape": lambda a, b, g, r: grouped_wgrad(a, g, r, out=b[:, :2]),
    "grouped_wgrad: accumulate=True with out=None": lambda a, b, g, r: grouped_wgrad(a, g, r, accumulate=True),
    "grouped_wgrad: out is given while a gradient is needed": lambda a, b, g, r: grouped_wgrad(
        a.requires_grad_(), g, r, out=b
    ),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_bad_input_is_refused_by_name(sentence):
    routing = routing_of()
    with pytest.raises(ValueError, match=sentence):
        REFUSED[sentence](*operands(routing, 4, 3, gather=False), routing)


def test_an_integer_operand_is_refused():
    routing = routing_of()
    a, b, _ = operands(routing, 4, 3, gather=False)
    with pytest.raises(TypeError, match=r"grouped_mm: a is torch\.int64; pass float64"):
        grouped_mm(a.long(), b, routing)
