from __future__ import annotations

from typing import Any

import pytest
import torch
from dormouse_model.config import ExpertsSection
from dormouse_model.router import Router, balance_loss, lowest_index_top_k


def section(num_experts: int = 16, top_k: int = 2, **changes: Any) -> ExpertsSection:
    return ExpertsSection(num_experts=num_experts, top_k=top_k, rank=2, shared_rank=2, d_ffn=8, **changes)


def make(config: ExpertsSection, seed: int = 0) -> Router:
    router = Router(6, config)
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(seed))
    return router


def hidden(rows: int = 64) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("num_experts", [4, 8, 16, 64, 1024])
def test_all_ties_go_to_the_lowest_indices(num_experts):
    router = Router(6, section(num_experts))
    torch.nn.init.zeros_(router.weight)
    assert torch.equal(router(hidden()).top_k_index, torch.tensor([[0, 1]]).expand(64, 2))


def test_ties_among_the_chosen_keep_the_order_of_the_indices():
    scores = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0]])
    assert lowest_index_top_k(scores, 4).tolist() == [[1, 3, 2, 4]]
    # The planted bug: the same choice made from the other end.
    assert (5 - lowest_index_top_k(scores.flip(-1), 4)).tolist() != [[1, 3, 2, 4]]


def test_without_ties_it_is_torchs_top_k():
    scores = torch.randn(50, 33, generator=torch.Generator().manual_seed(0))
    assert torch.equal(lowest_index_top_k(scores, 5), scores.topk(5).indices)
    assert torch.equal(lowest_index_top_k(scores, 33).sort().values, torch.arange(33).expand(50, 33))


def test_the_same_scores_route_alike_twice():
    router = make(section())
    first, second = router(hidden()), router(hidden())
    assert torch.equal(first.top_k_index, second.top_k_index)
    assert torch.equal(first.top_k_weights, second.top_k_weights)


def test_weights_of_two_sum_to_one_and_of_one_are_the_probability():
    two = make(section(top_k=2))(hidden())
    torch.testing.assert_close(two.top_k_weights.sum(-1), torch.ones(64))
    one = make(section(top_k=1))(hidden())
    assert torch.equal(one.top_k_weights, one.probabilities.max(-1, keepdim=True).values)


def test_a_single_expert_a_byte_still_trains_the_router():
    router = make(section(top_k=1))
    router(hidden()).top_k_weights.sum().backward()
    assert router.weight.grad is not None
    assert router.weight.grad.abs().max() > 1e-3


def test_the_scaling_factor_multiplies_the_weights_alone():
    plain, scaled = make(section())(hidden()), make(section(routed_scaling_factor=2.5))(hidden())
    torch.testing.assert_close(scaled.top_k_weights, 2.5 * plain.top_k_weights)
    assert torch.equal(scaled.probabilities, plain.probabilities)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_operands_are_rounded_and_all_else_is_fp32(dtype):
    router = make(section())
    with torch.autocast("cpu", torch.bfloat16):
        choice = router(hidden().to(dtype))
    assert choice.probabilities.dtype == choice.top_k_weights.dtype == torch.float32
    exact = torch.nn.functional.linear(hidden().bfloat16().double(), router.weight.bfloat16().double()).softmax(-1)
    torch.testing.assert_close(choice.probabilities.double(), exact, rtol=1e-5, atol=1e-6)


def counted(index: torch.Tensor, num_experts: int) -> torch.Tensor:
    return torch.bincount(index.flatten(), minlength=num_experts)


def test_even_use_costs_one_and_one_expert_for_all_costs_their_number():
    even = torch.arange(32).view(16, 2) % 8
    loss = balance_loss(torch.full((16, 8), 1 / 8), counted(even, 8))
    torch.testing.assert_close(loss, torch.tensor(1.0), rtol=0, atol=1e-6)
    one_hot = torch.eye(8)[torch.zeros(16, dtype=torch.int64)]
    assert balance_loss(one_hot, counted(torch.zeros(16, 1, dtype=torch.int64), 8)) == 8.0


def test_the_loss_is_of_one_softmax_over_all_experts():
    logits = torch.tensor([[5.0, 0.0, 0.0, 0.0]])
    counts = torch.tensor([1, 0, 0, 0])
    once = balance_loss(logits.softmax(-1), counts) / 4
    twice = balance_loss(logits.softmax(-1).softmax(-1), counts) / 4
    torch.testing.assert_close(once, torch.tensor(0.980), rtol=0, atol=5e-4)
    torch.testing.assert_close(twice, torch.tensor(0.469), rtol=0, atol=5e-4)


def test_the_loss_falls_as_use_evens_out():
    router = make(section())
    losses = []
    for _ in range(20):
        choice = router(hidden())
        loss = balance_loss(choice.probabilities, counted(choice.top_k_index, 16))
        (gradient,) = torch.autograd.grad(loss, [router.weight])
        with torch.no_grad():
            router.weight.sub_(gradient, alpha=0.5)
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.05
