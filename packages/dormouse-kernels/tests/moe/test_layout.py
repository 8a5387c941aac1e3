"""What both layouts promise an expert pass, dead rows above all."""

import pytest
import torch
from dormouse_kernels import route
from dormouse_kernels.moe.layout import sum_slots
from dormouse_kernels.moe.padded import PaddedRows
from dormouse_kernels.moe.reference import SortedRows

INDEX = torch.tensor([[1, 0], [-1, 1], [1, 7], [3, 1]])
LIVE = torch.tensor([[True, True], [False, True], [False, False], [True, False]])
"""With two rows an expert: expert 1 is chosen in slots 0, 3, 4 and 7, so the last two of them are dropped."""


@pytest.fixture(params=[SortedRows, PaddedRows])
def layout(request):
    return request.param(route(INDEX, 4), 2, torch.float64)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_values_of_slots_come_back_and_dead_slots_as_zero(layout):
    values = draw(4, 2)
    back = layout.to_slot(layout.of_slot(values).squeeze(-1))
    assert torch.equal(back, torch.where(LIVE, values, 0))


def test_dead_slots_are_zero_whatever_is_in_their_rows(layout):
    values = draw(4, 2)
    values[~LIVE] = torch.nan
    assert layout.of_slot(values).isfinite().all()
    back = layout.to_slot(layout.of_slot(values).squeeze(-1))
    assert torch.equal(back, torch.where(LIVE, values, 0))
    rows = layout.dispatch(draw(4, 3)).sum(-1)
    assert layout.to_slot(rows)[~LIVE].eq(0).all()


def test_dispatch_gives_every_live_row_its_token(layout):
    x = draw(4, 3)
    rows = layout.dispatch(x)
    for feature in range(3):
        assert torch.equal(
            layout.to_slot(rows[..., feature].clone()), torch.where(LIVE, x[:, feature : feature + 1], 0)
        )


def test_products_use_the_expert_of_the_row_and_dead_rows_count_as_zero(layout):
    x, bank = draw(4, 3), draw(4, 5, 3, seed=1)
    want = torch.zeros(4, 7, dtype=torch.float64)
    for token, choice in LIVE.nonzero().tolist():
        want[token, :5] += bank[INDEX[token, choice]] @ x[token]
    torch.testing.assert_close(layout.mm_combine(layout.dispatch(x), bank, 7), want)
    product = layout.mm(layout.dispatch(x), bank)
    torch.testing.assert_close(layout.to_slot(product[..., 0].clone()).sum(1), want[:, 0])


def test_sums_over_an_experts_rows_leave_dead_rows_out(layout):
    x, y = draw(4, 3), draw(4, 2, seed=1)
    outer, total = torch.zeros(4, 3, 2, dtype=torch.float64), torch.zeros(4, 3, dtype=torch.float64)
    for token, choice in LIVE.nonzero().tolist():
        outer[INDEX[token, choice]] += torch.outer(x[token], y[token])
        total[INDEX[token, choice]] += x[token]
    torch.testing.assert_close(layout.wgrad(layout.dispatch(x), layout.dispatch(y)), outer)
    torch.testing.assert_close(layout.expert_sum(layout.dispatch(x)), total)


def test_values_of_experts_meet_their_rows(layout):
    scale = draw(4, 3)
    rows = layout.dispatch(torch.ones(4, 3, dtype=torch.float64)) * layout.of_expert(scale)
    for token, choice in LIVE.nonzero().tolist():
        got = torch.stack([layout.to_slot(rows[..., feature].clone())[token, choice] for feature in range(3)])
        assert torch.equal(got, scale[INDEX[token, choice]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("order", "total"), [([0, 1, 2], 0.0), ([0, 2, 1], 1.0), ([1, 0, 2], 0.0)])
def test_slots_are_summed_in_their_order(dtype, order, total):
    """In fp32 2²⁷ + 1 − 2²⁷ is 0, but 2²⁷ − 2²⁷ + 1 is 1."""
    buffer = torch.tensor([[2.0**27], [1.0], [-(2.0**27)]], dtype=dtype)
    assert sum_slots(buffer, torch.tensor([order]), torch.float32).item() == total


@pytest.mark.parametrize("shape", [(0, 2), (3, 0)])
def test_no_slots_sum_to_zeros(shape):
    got = sum_slots(torch.empty(1, 5), torch.empty(shape, dtype=torch.int64), torch.float32)
    assert torch.equal(got, torch.zeros(shape[0], 5))
