"""How far two tensors are apart."""

from __future__ import annotations

import math

import pytest
import torch
from dormouse_bench import agreement
from dormouse_bench.agreement import distance, farthest


def test_a_distance_is_relative_l2_whatever_the_chunks(monkeypatch):
    want = torch.linspace(1, 2, 7).bfloat16()
    got = want.float() * 1.5
    assert distance(got, want) == pytest.approx(0.5)
    monkeypatch.setattr(agreement, "_CHUNK", 2)
    assert distance(got, want) == pytest.approx(0.5)


def test_zeros_are_met_by_zeros_alone():
    assert distance(torch.zeros(3), torch.zeros(3)) == 0
    assert distance(torch.ones(3), torch.zeros(3)) == math.inf


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"got has shape \(3,\), want \(1, 3\)"):
        distance(torch.ones(3), torch.ones(1, 3))


@pytest.mark.parametrize("place", [0, 1])
def test_the_farthest_is_no_number_where_one_is_none(place):
    pairs = [torch.ones(2), torch.ones(2)]
    assert farthest([pairs[0], pairs[1] * 3], pairs) == 2
    pairs[place] = pairs[place] * math.nan
    assert math.isnan(farthest(pairs, [torch.ones(2), torch.ones(2)]))
