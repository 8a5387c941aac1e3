"""Rates: closed forms at the corners, and nothing that depends on more than the step."""

from __future__ import annotations

import math

import pytest
from dormouse_train.config import TrainSection
from dormouse_train.optim.schedule import rate


def rates(**keys: object) -> list[float]:
    train = TrainSection.model_validate({"steps": 10, "warmup": 0, "decay_fraction": 0.0} | keys)
    return [rate(step, train) for step in range(train.steps)]


def test_warm_up_rises_linearly_and_its_first_step_moves() -> None:
    assert rates(warmup=4)[:6] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


def test_wsd_holds_the_peak_then_falls_linearly_to_a_last_step_above_zero() -> None:
    assert rates(decay_fraction=0.4) == pytest.approx([1] * 7 + [0.75, 0.5, 0.25])


def test_wsd_decay_begins_where_the_configuration_says() -> None:
    train = TrainSection(steps=100, warmup=0, decay_fraction=0.3)
    assert train.decay_begins == 70
    assert rate(70, train) == 1.0
    assert rate(71, train) < 1.0


def test_cosine_goes_from_the_peak_to_near_zero() -> None:
    got = rates(schedule="cosine", warmup=2)
    assert got == pytest.approx([0.5, 1.0] + [0.5 * (1 + math.cos(math.pi * i / 8)) for i in range(8)])


def test_a_longer_wsd_run_has_the_same_rates_until_the_shorter_one_decays() -> None:
    short, long = rates(steps=50, warmup=5, decay_fraction=0.2), rates(steps=80, warmup=5, decay_fraction=0.2)
    assert short[:41] == long[:41]
    assert short[41:] != long[41:50]


@pytest.mark.parametrize("schedule", ["wsd", "cosine"])
def test_every_rate_is_positive_and_at_most_the_peak(schedule: str) -> None:
    for steps in (1, 2, 7, 100):
        for warmup in (0, 1, 3, 200):
            for fraction in (0.0, 0.5, 1.0):
                got = rates(steps=steps, warmup=warmup, decay_fraction=fraction, schedule=schedule)
                assert all(0 < r <= 1 for r in got), (steps, warmup, fraction, got)


@pytest.mark.parametrize("schedule", ["wsd", "cosine"])
def test_past_the_end_the_rate_is_zero(schedule: str) -> None:
    train = TrainSection.model_validate({"steps": 3, "schedule": schedule})
    assert [rate(step, train) for step in (3, 4, 1000)] == [0.0] * 3


def test_a_schedule_that_has_no_rates_is_refused() -> None:
    train = TrainSection().model_copy(update={"schedule": "linear"})
    with pytest.raises(ValueError, match="'linear' has no rates"):
        rate(30, train)
