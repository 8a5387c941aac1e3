"""The one function that chooses an implementation."""

from typing import Any

import pytest
import torch
from dormouse_kernels.moe.selection import IMPLEMENTATIONS, choose

SHAPE: dict[str, Any] = {"T": 4096, "k": 2, "num_experts": 16, "d": 192, "r": 16, "f": 512, "dtype": torch.float32}


@pytest.mark.parametrize(("device", "chosen"), [("cpu", "reference"), ("cuda", "triton")])
def test_auto_takes_the_winner_of_the_device_and_considers_all(device, chosen):
    choice = choose("latent_glu_experts", device=device, **SHAPE)
    assert choice.implementation == chosen
    assert choice.considered[0][0] == chosen
    assert sorted(name for name, _ in choice.considered) == sorted(IMPLEMENTATIONS)
    assert choice.reason == choice.considered[0][1]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_name_overrides_the_choice(name, device):
    choice = choose("latent_glu_experts", implementation=name, device=device, **SHAPE)
    assert (choice.implementation, choice.reason) == (name, "asked for by name")


def test_an_unknown_name_is_refused_with_the_list():
    with pytest.raises(
        ValueError, match="glu_experts: implementation is 'grouped'; pass one of auto, reference, padded"
    ):
        choose("glu_experts", implementation="grouped", device="cpu", **SHAPE)
