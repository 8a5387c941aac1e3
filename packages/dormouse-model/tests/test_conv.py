from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from dormouse_model.conv import causal_conv


def draw(length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(length)
    x, weight, tail = (
        torch.randn(shape, generator=source, dtype=torch.float64, requires_grad=True)
        for shape in ((2, length, 6), (6, 1, 4), (2, 3, 6))
    )
    return x, weight, tail


def test_it_is_torchs_convolution_with_the_tail_before_the_sequence():
    x, weight, tail = draw(9)
    y, after = causal_conv(x, weight, tail)
    seen = torch.cat([tail, x], 1)
    torch.testing.assert_close(y, F.conv1d(seen.mT, weight, groups=6).mT)
    assert torch.equal(after, x[:, -3:])
    without, _ = causal_conv(x, weight)
    torch.testing.assert_close(without, F.conv1d(F.pad(x.mT, (3, 0)), weight, groups=6).mT)


@pytest.mark.parametrize("piece", [1, 2, 3, 5])
def test_pieces_shorter_than_the_taps_give_the_gradients_of_the_whole(piece):
    """A loss on the final tail as well: it reaches back through pieces of one byte."""

    def gradients(pieces: list[int]) -> tuple[torch.Tensor, ...]:
        x, weight, tail = draw(11)
        outputs, state, start = [], tail, 0
        for length in pieces:
            output, state = causal_conv(x[:, start : start + length], weight, state)
            outputs.append(output)
            start += length
        y = torch.cat(outputs, 1)
        ramp = torch.arange(1.0, 1 + y.numel(), dtype=torch.float64).view_as(y)
        loss = (y.sin() * ramp).sum() + (state.sin() * 3).sum()
        return torch.autograd.grad(loss, (x, weight, tail))

    pieces = [piece] * (11 // piece) + ([11 % piece] if 11 % piece else [])
    for got, want in zip(gradients(pieces), gradients([11]), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_two_bytes_leave_a_tail_that_reaches_into_the_tail_before():
    x, weight, tail = draw(2)
    _, after = causal_conv(x, weight, tail)
    assert torch.equal(after, torch.cat([tail[:, 2:], x], 1))
