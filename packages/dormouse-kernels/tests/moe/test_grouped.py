"""SwiGLU experts by the grouped Triton kernels, in the interpreter or on a GPU: every tail and extreme of routing."""

from dataclasses import dataclass, replace

import pytest
import torch
from dormouse_kernels import Counters, glu_experts, route
from dormouse_kernels.moe.grouped import launches, tiles
from dormouse_kernels.proof import oracle, relative_errors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BY_EXPERT = ("dU", "dD")


@dataclass
class Case:
    """Arguments of `glu_experts`, all random leaves, and a random upstream gradient."""

    x: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    weights: torch.Tensor
    index: torch.Tensor
    grad: torch.Tensor

    def run(self, experts, **options):
        leaves = (self.x, self.gate_up, self.down, self.weights)
        out = experts(self.x, self.gate_up, self.down, self.index, self.weights, **options)
        grads = torch.autograd.grad(out, leaves, self.grad.to(out.dtype), materialize_grads=True, allow_unused=True)
        return dict(zip(("out", "dx", "dU", "dD", "dw"), (out.detach(), *grads), strict=True))

    def triton(self):
        return self.run(glu_experts, implementation="triton")

    def wanted(self):
        if ((self.index >= 0) & (self.index < self.down.shape[0])).any():
            return self.run(oracle.glu_experts)
        return {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in self.triton().items()}


def make(T=13, D=17, I=18, E=5, k=2, *, index=None, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, by=1.0):
        drawn = by * torch.randn(*shape, generator=generator, dtype=torch.float64)
        return drawn.to(DEVICE, dtype).requires_grad_()

    if index is None:
        index = torch.rand(T, E, generator=generator).argsort(dim=1)[:, :k]
    T, k = index.shape
    return Case(
        x=draw(T, D), gate_up=draw(E, 2 * I, D, by=D**-0.5), down=draw(E, D, I, by=I**-0.5), weights=draw(T, k),
        index=index.to(DEVICE), grad=draw(T, D).detach(),
    )  # fmt: skip


def assert_equals_the_oracle(case, bound=3e-6):
    errors = relative_errors(case.triton(), case.wanted(), by_expert=BY_EXPERT)
    assert all(error <= bound for error in errors.values()), errors


@pytest.mark.parametrize(("D", "inner"), [(32, 16), (33, 21), (1, 1), (16, 40)])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_value_and_every_gradient_equal_the_dense_loop(D, inner, k):
    assert_equals_the_oracle(make(D=D, I=inner, k=k))


EXTREMES = {
    "no tokens": torch.zeros(0, 2, dtype=torch.int64),
    "one token": torch.tensor([[4, 1]]),
    "all to one expert, several tiles": torch.full((40, 1), 3),
    "one expert twice a token": torch.full((21, 2), 4),
    "sentinels, and tokens with nothing else": torch.tensor([[-1, 2], [5, 9], [1, 4], [0, -3], [-1, -1], [3, 2**40]]),
    "sentinels alone": torch.full((20, 2), -1),
    "int32": torch.tensor([[4, 0], [1, 4]], dtype=torch.int32),
}


@pytest.mark.parametrize("routing", EXTREMES)
def test_extreme_routings_equal_the_dense_loop(routing):
    assert_equals_the_oracle(make(index=EXTREMES[routing]))


def test_an_idle_experts_gradients_are_exact_zeros():
    got = make(index=torch.tensor([[0, 3]]).repeat(11, 1)).triton()
    for name in BY_EXPERT:
        assert (got[name][[1, 2, 4]] == 0).all(), name
        assert (got[name][[0, 3]] != 0).any(), name


def test_a_token_that_is_not_a_number_spoils_no_other_token_and_no_other_expert():
    case = make(T=8, index=torch.tensor([[0, 1], [2, 3]]).repeat(4, 1))
    with torch.no_grad():
        case.x[1] = torch.nan
    got = case.triton()
    assert got["out"].isnan().any(1).tolist() == [False, True] + 6 * [False]
    assert got["dU"].isnan().flatten(1).any(1).tolist() == [False, False, True, True, False]


def test_half_precision_equals_the_dense_loop_within_its_rounding():
    assert_equals_the_oracle(make(D=32, dtype=torch.float16), bound=4e-3)


def test_banks_narrower_than_the_tokens_are_promoted():
    case = make()
    case.gate_up, case.down = (bank.detach().half().requires_grad_() for bank in (case.gate_up, case.down))
    got, want = case.triton(), case.wanted()
    assert got["out"].dtype == torch.float32
    assert got["dU"].dtype == got["dD"].dtype == torch.float16
    errors = relative_errors(got, want, by_expert=BY_EXPERT)
    assert all(error <= (1e-3 if name in BY_EXPERT else 3e-6) for name, error in errors.items()), errors


def test_strided_tokens_banks_and_gradients_give_the_same_bits():
    case = make()
    case.grad = case.grad[:, :1].expand_as(case.grad)
    plain = replace(case, grad=case.grad.contiguous()).triton()

    def spread(tensor):
        """The same values, every row in a row of twice the length."""
        return torch.stack([tensor.detach()] * 2, dim=-2).flatten(-2)[..., : tensor.shape[-1]]

    case.x, case.gate_up, case.down = (spread(t).requires_grad_() for t in (case.x, case.gate_up, case.down))
    assert not case.down.is_contiguous()
    assert case.grad.stride(1) == 0
    got = case.triton()
    for name, tensor in plain.items():
        assert torch.equal(got[name], tensor), name


def test_a_second_call_and_a_routing_made_before_give_the_same_bits():
    case = make()
    first = case.triton()
    routing = route(case.index, 5)
    again = case.run(glu_experts, implementation="triton", routing=routing)
    for name, tensor in first.items():
        assert torch.equal(again[name], tensor), name


@pytest.mark.parametrize("times", [0, 4])
def test_persistent_programs_give_the_same_bits(monkeypatch, times):
    case = make(index=torch.tensor([[0, 3], [-1, 3], [3, 1], [5, 0], [3, 3]]).repeat(times, 1))
    plain = case.triton()
    original = launches.tiles_of

    def persistent(routing, dtype):
        table = original(routing, dtype)
        looped = {name: replace(getattr(table, name), persistent=1) for name in ("up", "down", "gate", "dx")}
        return replace(table, **looped)

    monkeypatch.setattr(launches, "tiles_of", persistent)
    got = case.triton()
    for name, tensor in plain.items():
        assert torch.equal(got[name], tensor), name


def test_only_wanted_gradients_are_made():
    case = make()
    whole = case.triton()
    for name, leaf in (("dx", case.x), ("dU", case.gate_up), ("dD", case.down), ("dw", case.weights)):
        out = glu_experts(
            *(each if each is leaf else each.detach() for each in (case.x, case.gate_up, case.down)), case.index,
            case.weights if leaf is case.weights else case.weights.detach(), implementation="triton",
        )  # fmt: skip
        (got,) = torch.autograd.grad(out, leaf, case.grad)
        assert torch.equal(got, whole[name]), name


def test_the_call_is_counted_and_capacity_falls_back_by_name_of_the_reason():
    case = make()
    with Counters() as counters:
        case.triton()
    assert counters.snapshot() == {"moe.glu_experts/forward/triton": 1}
    with pytest.raises(ValueError, match="glu_experts: implementation='triton' cannot take capacity=3"):
        case.run(glu_experts, implementation="triton", capacity=3)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_experts_of_few_rows_get_tiles_of_half_the_rows(capability):
    many, few = (tiles.tiles_for(capability, 2, rows) for rows in (1024, 32))
    assert many.up.rows == 2 * few.up.rows
    # one tile map serves a forward and its backward
    assert {many.rows} == {many.down.rows, many.gate.rows, many.dx.rows}
