from __future__ import annotations

import pytest
import torch
from dormouse_model.sampling import NonFiniteLogits, Sampling


def source() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def drawn(sampling: Sampling, logits: torch.Tensor, times: int = 300) -> set[int]:
    generator = source()
    return {sampling.draw(logits, generator) for _ in range(times)}


def ladder() -> torch.Tensor:
    """Probabilities 0.4, 0.3, 0.2, 0.1 of bytes 9, 5, 7, 3, and nothing else."""
    logits = torch.full((256,), -1e4)
    logits[[9, 5, 7, 3]] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    return logits


def test_temperature_shapes_the_draw():
    logits = torch.zeros(256)
    logits[65], logits[66] = 5.0, 4.0
    assert Sampling(0).draw(logits, source()) == 65
    assert drawn(Sampling(0.01), logits) == {65}
    generator = source()
    ones = sum(Sampling().draw(logits, generator) == 65 for _ in range(2000)) / 2000
    assert abs(ones - float(logits.softmax(-1)[65])) < 0.04
    assert len(drawn(Sampling(1e6), logits)) > 80


def test_a_tiny_temperature_does_not_overflow():
    assert Sampling(1e-30).draw(torch.linspace(-80, 80, 256), source()) == 255


@pytest.mark.parametrize(("top_k", "kept"), [(1, {9}), (2, {9, 5}), (3, {9, 5, 7}), (256, {9, 5, 7, 3})])
def test_top_k_keeps_the_most_probable_bytes(top_k, kept):
    assert drawn(Sampling(top_k=top_k), ladder()) == kept


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-9, {9}), (0.39, {9}), (0.41, {9, 5}), (0.69, {9, 5}), (0.71, {9, 5, 7}), (1.0, {9, 5, 7, 3})],
)
def test_top_p_keeps_the_fewest_bytes_that_together_have_its_share(top_p, kept):
    assert drawn(Sampling(top_p=top_p), ladder()) == kept


def test_top_p_is_a_share_of_what_top_k_left():
    # 0.4 and 0.3 of 0.7: the first has 0.571 of it, and 0.5 of the whole would have taken both.
    assert drawn(Sampling(top_k=2, top_p=0.5), ladder()) == {9}


def test_a_cut_leaves_the_odds_of_what_it_keeps():
    generator = source()
    nines = sum(Sampling(top_k=2).draw(ladder(), generator) == 9 for _ in range(2000)) / 2000
    assert abs(nines - 4 / 7) < 0.04


def test_of_equal_bytes_the_lower_ones_are_kept():
    assert drawn(Sampling(top_k=3), torch.zeros(256)) == {0, 1, 2}


def test_what_cuts_nothing_draws_what_no_cut_draws():
    logits, one, other = torch.randn(256, generator=source()), source(), source()
    cut = Sampling(0.7, top_k=256, top_p=1.0)
    assert [cut.draw(logits, one) for _ in range(50)] == [Sampling(0.7).draw(logits, other) for _ in range(50)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": -1.0}, "temperature must be 0 or more, got -1.0"),
        ({"temperature": float("nan")}, "temperature must be 0 or more"),
        ({"temperature": float("inf")}, "temperature must be 0 or more"),
        ({"top_k": 0}, "top_k must be 1 or more, got 0"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"top_p": float("nan")}, "top_p must be above 0"),
    ],
)
def test_impossible_draws_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        Sampling(**options)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error_and_not_a_byte(temperature, wrong):
    with pytest.raises(NonFiniteLogits, match="not finite; load an earlier checkpoint"):
        Sampling(temperature).draw(torch.full((256,), wrong), source())
