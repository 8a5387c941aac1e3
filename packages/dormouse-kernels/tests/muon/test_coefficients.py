"""The shipped quintics are the designed ones, and the designed ones are optimal."""

import itertools

import pytest
import torch
from dormouse_kernels.muon.coefficients import DESIGNED, LOWER, Quintic, design, minimax, worst_error


def composed(quintics, x):
    for quintic in quintics:
        x = x * (quintic.a + x**2 * (quintic.b + x**2 * quintic.c))
    return x


def grid(lower):
    return torch.linspace(lower, 1, 200_001, dtype=torch.float64)


def test_there_is_a_design_for_three_four_and_five_steps():
    assert sorted(DESIGNED) == sorted(LOWER) == [3, 4, 5]
    assert [len(DESIGNED[steps]) for steps in (3, 4, 5)] == [3, 4, 5]


@pytest.mark.parametrize("steps", [3, 4, 5])
def test_the_shipped_coefficients_are_derived_anew(steps):
    for shipped, derived in zip(DESIGNED[steps], design(steps, LOWER[steps]), strict=True):
        assert shipped == pytest.approx(derived, rel=1e-10)


@pytest.mark.parametrize("steps", [3, 4, 5])
def test_every_value_above_lower_is_mapped_within_a_tenth_of_one(steps):
    error = (1 - composed(DESIGNED[steps], grid(LOWER[steps]))).abs().max().item()
    assert error < 0.1
    assert worst_error(DESIGNED[steps], LOWER[steps]) == pytest.approx(error, abs=1e-8)


@pytest.mark.parametrize("steps", [3, 4, 5])
def test_values_below_lower_are_lifted_and_never_past_the_band(steps):
    small = torch.linspace(0, LOWER[steps], 10_001, dtype=torch.float64)
    lifted = composed(DESIGNED[steps], small)
    assert lifted.diff().min() > 0
    assert lifted.max() < 1.1


def test_a_longer_design_cut_short_is_not_a_design():
    assert (1 - composed(DESIGNED[5][:3], grid(LOWER[3]))).abs().max() > 0.5


def test_one_step_alternates_at_four_points_so_no_odd_quintic_is_nearer_to_one():
    low, high = 0.05, 1.0
    best = minimax(low, high)
    x = torch.linspace(low, high, 100_001, dtype=torch.float64)
    error = 1 - composed([best], x)
    largest = error.abs().max()
    extremes = [error[0], *(error[1:-1][(error[1:-1].abs() > largest - 1e-7)]), error[-1]]
    signs = [sign for sign, _ in itertools.groupby(int(torch.sign(value)) for value in extremes)]
    assert signs == [1, -1, 1, -1]
    assert error[0].abs() == pytest.approx(largest.item(), abs=1e-9)


def test_no_neighbour_of_the_minimax_quintic_is_better():
    best = minimax(0.05, 1.0)
    x = torch.linspace(0.05, 1, 20_001, dtype=torch.float64)
    least = (1 - composed([best], x)).abs().max()
    for moves in itertools.product((-1e-3, 0, 1e-3), repeat=3):
        moved = Quintic(*(value * (1 + move) for value, move in zip(best, moves, strict=True)))
        assert (1 - composed([moved], x)).abs().max() >= least


def test_a_collapsed_interval_takes_the_taylor_quintic():
    middle = 0.7
    quintic = minimax(middle * (1 - 1e-9), middle * (1 + 1e-9))
    assert quintic(middle) == pytest.approx(1.0)
    for nearby in (0.99, 1.01):
        assert abs(1 - quintic(nearby * middle)) < 4e-6


@pytest.mark.parametrize(
    ("steps", "lower", "message"),
    [(0, 0.1, "steps is 0; pass at least 1"), (3, 0.0, "lower is 0.0"), (3, 1.0, "lower is 1.0")],
)
def test_a_design_that_makes_no_sense_is_refused(steps, lower, message):
    with pytest.raises(ValueError, match=message):
        design(steps, lower)
