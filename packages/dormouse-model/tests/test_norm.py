from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from dormouse_model.norm import RMS_EPS, RMSNorm, unit


@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 4, 5)])
def test_the_rms_norm_is_torchs_and_its_backward_the_derivative(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    norm = RMSNorm(shape[-1]).double()
    torch.nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(norm(x), F.rms_norm(x, shape[-1:], norm.weight, RMS_EPS))
    assert torch.autograd.gradcheck(lambda x, _: norm(x), (x, norm.weight))


def test_a_low_precision_input_is_normalised_in_fp32_and_comes_back_low():
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    norm = RMSNorm(24)
    torch.nn.init.ones_(norm.weight)
    assert torch.equal(norm(x), norm(x.float()).bfloat16())


def test_unit_rows_have_length_one_and_the_derivative_is_right():
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(unit(x).norm(dim=-1), torch.ones(3, dtype=torch.float64), rtol=1e-5, atol=0)
    assert torch.autograd.gradcheck(unit, x)


def test_a_row_of_zeros_stays_zero_with_a_finite_gradient():
    x = torch.zeros(2, 5, requires_grad=True)
    (unit(x) * torch.arange(5.0)).sum().backward()
    assert x.grad is not None
    assert torch.equal(unit(x), torch.zeros(2, 5))
    assert bool(x.grad.isfinite().all())
    assert bool((x.grad[:, 1:] != 0).all())
