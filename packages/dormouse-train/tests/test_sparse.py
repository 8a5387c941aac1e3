"""Sparse Adam: torch's own as the oracle, and what must not move."""

from __future__ import annotations

import pytest
import torch
from dormouse_train.optim.sparse import sparse_adam_
from torch import Tensor

RATE, BETAS, EPS = 0.1, (0.9, 0.95), 1e-8


class Table:
    """A table with its moments, stepped by hand."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.updates = values.clone(), torch.zeros(())
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(values), torch.zeros_like(values)

    def step(self, rows: list[int], gradients: Tensor, rate: float = RATE) -> None:
        grad = torch.sparse_coo_tensor(torch.tensor([rows]), gradients, self.values.shape, check_invariants=True)
        sparse_adam_(
            *(self.values, grad, self.exp_avg, self.exp_avg_sq, self.updates),
            rate=torch.tensor(rate),
            betas=BETAS,
            eps=EPS,
        )


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_it_is_torchs_sparse_adam_repeated_rows_included():
    table, twin = Table(drawn(7, 3, seed=0)), drawn(7, 3, seed=0).requires_grad_()
    torchs = torch.optim.SparseAdam([twin], lr=RATE, betas=BETAS, eps=EPS)
    for step, rows in enumerate(([1, 4, 1], [4], [0, 6, 0, 0], [1, 4, 6])):
        gradients = drawn(len(rows), 3, seed=step)
        table.step(rows, gradients)
        twin.grad = torch.sparse_coo_tensor(torch.tensor([rows]), gradients, twin.shape, check_invariants=True)
        torchs.step()
        torch.testing.assert_close(table.values, twin.detach())


def test_equal_rows_are_summed_and_move_once():
    apart, together = Table(torch.zeros(4, 2)), Table(torch.zeros(4, 2))
    gradients = torch.tensor([[1.0, 2.0], [8.0, 8.0], [3.0, -4.0]])
    apart.step([2, 0, 2], gradients)
    together.step([2, 0], torch.tensor([[4.0, -2.0], [8.0, 8.0]]))
    for name in ("values", "exp_avg", "exp_avg_sq", "updates"):
        assert torch.equal(getattr(apart, name), getattr(together, name)), name
    # The first update of a row is the rate, whatever the gradient.
    torch.testing.assert_close(apart.values[2], torch.tensor([-RATE, RATE]))


def test_a_row_that_was_not_read_keeps_its_value_and_its_moments():
    table = Table(drawn(5, 2, seed=0))
    table.step([0, 1, 2, 3, 4], drawn(5, 2, seed=1))
    before = {name: getattr(table, name).clone() for name in ("values", "exp_avg", "exp_avg_sq")}
    table.step([1, 3], drawn(2, 2, seed=2))
    for name, was in before.items():
        same = (getattr(table, name) == was).all(-1).tolist()
        assert same == [True, False, True, False, True], name


def test_a_gradient_of_no_rows_moves_nothing():
    table = Table(drawn(5, 2, seed=0))
    table.step([], torch.zeros(0, 2))
    assert torch.equal(table.values, drawn(5, 2, seed=0))


@pytest.mark.parametrize("threads", [1, 2])
def test_the_bits_are_the_same_every_time(threads):
    rows = torch.randint(0, 50, (4000,), generator=torch.Generator().manual_seed(0)).tolist()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tables = [Table(drawn(50, 8, seed=0)) for _ in range(3)]
        for table in tables:
            table.step(rows, drawn(4000, 8, seed=1))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(tables[0].values, other.values) for other in tables[1:])
