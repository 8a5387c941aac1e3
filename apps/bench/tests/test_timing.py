"""Races between arms."""

from __future__ import annotations

import time
import warnings

import pytest
import torch
from dormouse_bench.timing import host_syncs, median_ms, peak_extra_bytes, race


def test_arms_take_turns_and_the_first_runs_twice_a_round():
    seen: list[str] = []
    arms = {name: (lambda name=name: seen.append(name)) for name in ("a", "b")}
    race(arms, "cpu", rounds=2)
    assert "".join(seen) == "ab" + "aba" * 2


def test_a_ratio_is_of_medians_in_milliseconds(monkeypatch):
    cost = {"slow": 0.004, "fast": 0.001}
    now = [0.0]

    def spend(name):
        now[0] += cost[name]

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    result = race({name: (lambda name=name: spend(name)) for name in cost}, "cpu", rounds=3)
    assert result.ms == pytest.approx({"slow": 4.0, "fast": 1.0})
    assert result.ratio("slow", "fast") == pytest.approx(4.0)
    assert result.noise == pytest.approx(0.0)


def test_the_noise_is_the_distance_of_the_first_arm_from_itself(monkeypatch):
    now, calls = [0.0], [0]

    def drifting():
        calls[0] += 1
        now[0] += 0.002 if calls[0] % 2 == 0 else 0.003  # warm-up 1st, then 2 ms first and 3 ms last of the round

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert race({"only": drifting}, "cpu", rounds=1).noise == pytest.approx(0.5)


def test_a_race_of_no_rounds_is_refused():
    with pytest.raises(ValueError, match="rounds is 0"):
        race({"a": lambda: None}, "cpu", rounds=0)


def test_a_cpu_counts_no_bytes():
    assert peak_extra_bytes(lambda: None, "cpu") is None


def test_a_median_is_of_at_least_three_calls_and_fills_its_budget(monkeypatch):
    now, costs = [0.0], iter([9.0, 0.001, 0.007, 0.002, 0.002, 0.002])

    def work():
        now[0] += next(costs)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert median_ms(work, "cpu", budget_ms=11) == pytest.approx(2.0)  # 1, 7, 2, 2: the warm-up does not count
    assert next(costs) == 0.002


def test_every_wait_for_the_device_counts_and_other_warnings_do_not(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def work(fail=False):
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        if fail:
            raise ValueError

    assert host_syncs(work, "cuda") == 3
    with pytest.raises(ValueError):
        host_syncs(lambda: work(fail=True), "cuda")
    assert modes == ["warn", 0] * 2
    assert host_syncs(work, "cpu") is None
