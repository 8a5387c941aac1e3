from __future__ import annotations

import math

import pytest
import torch
from dormouse_model.loss import bits_per_byte, next_byte_loss


def test_the_loss_is_the_mean_surprise_in_nats():
    logits = torch.zeros(2, 3, 256)
    logits[0, 0, 65] = math.log(255)  # probability one half
    targets = torch.full((2, 3), 65, dtype=torch.uint8)
    want = (math.log(2) + 5 * math.log(256)) / 6
    assert next_byte_loss(logits, targets).item() == pytest.approx(want, rel=1e-6)


def test_a_uniform_guess_costs_eight_bits():
    loss = next_byte_loss(torch.zeros(1, 4, 256), torch.arange(4).view(1, 4))
    assert bits_per_byte(loss.item()) == pytest.approx(8.0, rel=1e-6)


def test_low_precision_logits_are_summed_in_fp32():
    logits = torch.randn(1, 500, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.zeros(1, 500, dtype=torch.uint8)
    loss = next_byte_loss(logits, targets)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, next_byte_loss(logits.float(), targets))


def test_one_target_a_position_is_required():
    with pytest.raises(ValueError, match="give one target byte a position"):
        next_byte_loss(torch.zeros(1, 4, 256), torch.zeros(1, 5, dtype=torch.uint8))
