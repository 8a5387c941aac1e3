"""Split masters, orthogonalisation, retraction and the Muon step on factors, in plain torch."""

from typing import Any

import pytest
import torch
from dormouse_kernels import muon
from dormouse_kernels.muon.coefficients import LOWER


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(7)


def orthonormal(*shape, generator):
    """[..., r, n] with orthonormal rows, from a QR in fp64."""
    return torch.linalg.qr(torch.randn(*shape, generator=generator, dtype=torch.float64).mT)[0].mT.float().contiguous()


def polar(x):
    left, _, right = torch.linalg.svd(x.double(), full_matrices=False)
    return left @ right


def gram_error(x):
    return (x @ x.mT - torch.eye(x.shape[-2])).abs().max().item()


LOW_HALVES = torch.tensor(
    sorted(
        {
            0,
            1,
            2,
            0x7FFE,
            0x7FFF,
            0x8000,
            0x8001,
            0xFFFE,
            0xFFFF,
            *(1 << bit for bit in range(16)),
            *range(0, 1 << 16, 4099),
        }
    )
)


def test_a_split_master_joins_to_the_same_bits_for_every_high_half():
    high = torch.arange(1 << 16, dtype=torch.int64)
    for low in LOW_HALVES.tolist():
        bits = ((high << 16) | low).to(torch.uint32).view(torch.int32)
        joined = muon.join_master(*muon.split_master(bits.view(torch.float32)))
        assert torch.equal(joined.view(torch.int32), bits), f"low half {low:#06x}"


def test_the_high_half_is_the_master_rounded_to_nearest(generator):
    master = torch.randn(10_000, generator=generator)
    high, low = muon.split_master(master)
    assert (high.dtype, low.dtype) == (torch.bfloat16, torch.int16)
    ties = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(high[~ties], master.bfloat16()[~ties])


def test_ties_round_away_from_zero():
    bits = torch.tensor([0x3F808000, 0x3F818000, -0x407F8000], dtype=torch.int32)
    high = muon.split_master(bits.view(torch.float32))[0]
    assert high.tolist() == [1.0078125, 1.015625, -1.0078125]


def test_two_masters_with_one_rounded_bank_stay_apart():
    """Where `.to(bfloat16)` alone would lose which neighbour it came from."""
    bits = torch.tensor([0x3F808000, 0x3F7F8000], dtype=torch.int32)
    masters = bits.view(torch.float32)
    high, low = muon.split_master(masters)
    assert masters.bfloat16().tolist() == [1.0, 1.0]
    assert torch.equal(muon.join_master(high, low), masters)


def test_split_and_join_take_any_shape_and_stride(generator):
    master = torch.randn(3, 4, 5, generator=generator).mT
    high, low = muon.split_master(master)
    assert high.shape == low.shape == (3, 5, 4)
    assert torch.equal(muon.join_master(high, low), master)
    assert muon.join_master(*muon.split_master(torch.empty(0, 3))).shape == (0, 3)
    assert muon.join_master(*muon.split_master(torch.tensor(1.5))).item() == 1.5


def test_split_and_join_refuse_other_dtypes_and_shapes():
    with pytest.raises(TypeError, match=r"master is torch.bfloat16; pass the float32 master"):
        muon.split_master(torch.zeros(2, dtype=torch.bfloat16))
    high, low = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int16)
    with pytest.raises(TypeError, match="pass bfloat16 high and int16 low"):
        muon.join_master(high.float(), low)
    with pytest.raises(ValueError, match=r"high is \[2\] but low is \[1\]"):
        muon.join_master(high, low[:1])


@pytest.mark.parametrize("steps", [3, 4, 5])
@pytest.mark.parametrize("shape", [(16, 192), (64, 2048), (1, 8), (32, 32)])
def test_orthogonalize_brings_singular_values_near_one(generator, steps, shape):
    x = torch.randn(2, *shape, generator=generator)
    got = muon.orthogonalize(x, steps)
    values = torch.linalg.svdvals(x.double())
    reach = values > LOWER[steps] * (values**4).sum(-1, keepdim=True) ** 0.25
    assert reach.float().mean() > 0.9
    values = torch.linalg.svdvals(got.double())
    assert (1 - values[reach]).abs().max() < 0.1
    assert values.max() < 1.1


def test_orthogonalize_turns_nothing():
    """Its singular vectors are those of x: polar(x) differs from it by its singular values only."""
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    middle = left.mT @ muon.orthogonalize(x) @ right.mT
    assert (middle - middle.diagonal().diag()).abs().max() < 1e-9


def test_newton_schulz_really_runs(generator):
    """A Muon that silently is SGD would return the gradient itself, whose singular values span a decade here."""
    x = torch.randn(32, 48, generator=generator)
    got = muon.orthogonalize(x)
    spread = torch.linalg.svdvals(x)
    assert spread[0] / spread[-1] > 5
    lifted = torch.linalg.svdvals(got)
    assert lifted[0] / lifted[-1] < 1.25
    assert torch.nn.functional.cosine_similarity(got.flatten(), x.flatten(), dim=0) < 0.97


@pytest.mark.parametrize("steps", [3, 4, 5])
@pytest.mark.parametrize("factor", [1e-30, 1e-12, 1e-8, 1e-4, 1e3, 1e6, 1e30])
def test_orthogonalize_forgets_the_scale(generator, steps, factor):
    x = torch.randn(3, 16, 192, generator=generator)
    assert (muon.orthogonalize(x * factor, steps) - muon.orthogonalize(x, steps)).abs().max() < 1e-5


def test_the_zero_matrix_orthogonalizes_to_exact_zeros():
    x = torch.zeros(2, 4, 8)
    x[1] = torch.eye(4, 8)
    got = muon.orthogonalize(x)
    assert torch.equal(got[0], torch.zeros(4, 8))
    assert got[1].diagonal().sub(1).abs().max() < 0.1


def test_rank_one_and_a_spike_stay_finite(generator):
    one = torch.randn(16, 1, generator=generator) @ torch.randn(1, 96, generator=generator)
    values = torch.linalg.svdvals(muon.orthogonalize(one))
    assert values[0] == pytest.approx(1, abs=0.1)
    assert values[1] < 1e-3
    spike = torch.randn(16, 96, generator=generator)
    spike[3] *= 1e4
    values = torch.linalg.svdvals(muon.orthogonalize(spike))
    assert values.isfinite().all()
    assert values.max() < 1.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_orthogonalize_keeps_the_dtype(generator, dtype):
    x = torch.randn(8, 32, generator=generator)
    got = muon.orthogonalize(x.to(dtype))
    assert got.dtype == dtype
    assert (got.float() - muon.orthogonalize(x)).abs().max() < 2e-2


def test_a_batch_equals_the_loop(generator):
    x = torch.randn(6, 2, 8, 40, generator=generator)
    near = orthonormal(6, 2, 8, 40, generator=generator) + 0.01 * x
    for function, batch in ((muon.orthogonalize, x), (muon.retract, near), (muon.orthonormality_error, near)):
        whole = function(batch)
        for i in range(6):
            for j in range(2):
                assert (whole[i, j] - function(batch[i, j])).abs().max() < 1e-6, function.__name__


def test_a_bank_of_a_thousand_retracts_like_the_loop(generator):
    near = orthonormal(1024, 4, 24, generator=generator) + 0.01 * torch.randn(1024, 4, 24, generator=generator)
    loop = torch.stack([muon.retract(matrix) for matrix in near])
    assert (muon.retract(near) - loop).abs().max() < 1e-6


@pytest.mark.parametrize("shape", [(16, 192), (64, 256), (64, 64), (16, 512)])
def test_retraction_leaves_orthonormal_rows_alone(generator, shape):
    factor = orthonormal(3, *shape, generator=generator)
    assert (muon.retract(factor) - factor).abs().max() < 1e-6


def test_a_quintic_of_muon_would_not_leave_them_alone(generator):
    """The planted bug: `orthogonalize` moves orthonormal rows by several per cent, so it is no retraction."""
    factor = orthonormal(64, 256, generator=generator)
    assert gram_error(muon.orthogonalize(factor)) > 0.01


@pytest.mark.parametrize("shape", [(16, 192), (64, 256), (64, 2048)])
def test_retraction_after_noise_is_the_polar_factor_and_keeps_the_span(generator, shape):
    noisy = orthonormal(*shape, generator=generator) + 0.01 * torch.randn(*shape, generator=generator)
    got = muon.retract(noisy)
    assert gram_error(got) < 1e-5
    assert (got - polar(noisy)).abs().max() < 1e-5
    assert (muon.retract(got) - got).abs().max() < 1e-6
    span = torch.linalg.qr(noisy.double().mT)[0].float()
    assert (span @ span.mT - got.mT @ got).abs().max() < 1e-4


def test_retraction_forgets_a_common_scale(generator):
    factor = orthonormal(16, 192, generator=generator)
    for scale in (0.01, 3.0, 1e4):
        assert (muon.retract(factor * scale) - factor).abs().max() < 1e-5


def test_dependent_rows_never_give_nan_and_are_refused_by_bound(generator):
    factors = orthonormal(3, 16, 48, generator=generator)
    factors[1, 5] = factors[1, 4]
    got = muon.retract(factors)
    assert got.isfinite().all()
    error = muon.orthonormality_error(got)
    assert error[1] > 0.1
    assert error[[0, 2]].max() < 1e-5
    with pytest.raises(ValueError, match=r"retract: matrix \[1\] has orthonormality error .* over 0.001; its rows"):
        muon.retract(factors, bound=1e-3)
    assert torch.equal(muon.retract(factors[[0, 2]], bound=1e-3), got[[0, 2]])


@pytest.mark.parametrize("x", [torch.zeros(4, 8), torch.ones(4, 8), torch.ones(16, 32), torch.full((4, 8), 1e-30)])
def test_a_hopeless_factor_stays_finite(x):
    assert muon.retract(x, steps=6).isfinite().all()


def test_a_nan_is_over_any_bound():
    with pytest.raises(ValueError, match=r"matrix \[\] has orthonormality error nan"):
        muon.retract(torch.full((2, 4), torch.nan), bound=1e9)


def test_retraction_refuses_low_precision():
    with pytest.raises(TypeError, match=r"retract: x is torch.bfloat16; pass the float32 master"):
        muon.retract(torch.eye(4, dtype=torch.bfloat16))


@pytest.mark.parametrize("function", [muon.orthogonalize, muon.retract, muon.orthonormality_error])
def test_columns_are_refused_with_the_mend(function):
    with pytest.raises(ValueError, match=r"x has shape \[8, 4\]; pass \[..., r, n\] with r <= n, x.mT for columns"):
        function(torch.zeros(8, 4))


def test_orthogonalize_refuses_steps_without_a_design():
    with pytest.raises(ValueError, match="steps is 2; pass one of 3, 4, 5"):
        muon.orthogonalize(torch.eye(4), steps=2)


def test_the_error_is_the_gram_distance_over_root_r(generator):
    x = torch.randn(5, 4, 9, generator=generator, dtype=torch.float64)
    want = torch.stack([torch.linalg.matrix_norm(m @ m.T - torch.eye(4, dtype=torch.float64)) / 2 for m in x])
    torch.testing.assert_close(muon.orthonormality_error(x), want)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_momentum_is_the_closed_form_whatever_its_dtype(generator, nesterov, dtype):
    master = orthonormal(2, 8, 24, generator=generator)
    momentum = torch.zeros(2, 8, 24, dtype=dtype)
    grads = torch.randn(4, 2, 8, 24, generator=generator)
    want = torch.zeros(2, 8, 24, dtype=torch.float64)
    for grad in grads:
        given = grad.clone()
        master, momentum = muon.muon_factor_step(master, grad, momentum, lr=0.02, beta=0.9, nesterov=nesterov)
        want = 0.9 * want + 0.1 * grad.double()
        assert torch.equal(grad, given)
    assert momentum.dtype == dtype
    torch.testing.assert_close(
        momentum.double(),
        want,
        rtol=1e-5 if dtype == torch.float32 else 2e-2,
        atol=1e-6 if dtype == torch.float32 else 5e-3,
    )


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_step_is_the_polar_factor_of_the_orthogonalized_update(generator, nesterov):
    master = orthonormal(8, 24, generator=generator)
    grad, momentum = torch.randn(2, 8, 24, generator=generator)
    got, mean = muon.muon_factor_step(master, grad, momentum, lr=0.05, beta=0.8, nesterov=nesterov)
    expected_mean = 0.8 * momentum + 0.2 * grad
    direction = 0.2 * grad + 0.8 * expected_mean if nesterov else expected_mean
    torch.testing.assert_close(mean, expected_mean)
    assert (got - polar(master - 0.05 * muon.orthogonalize(direction))).abs().max() < 1e-6
    assert muon.orthonormality_error(got) < 1e-6


def test_two_hundred_steps_do_not_drift_from_orthonormal(generator):
    master = orthonormal(4, 8, 24, generator=generator)
    momentum = torch.zeros_like(master)
    for _ in range(200):
        grad = torch.randn(4, 8, 24, generator=generator)
        master, momentum = muon.muon_factor_step(master, grad, momentum, lr=0.05)
    assert muon.orthonormality_error(master).max() < 1e-6


def test_without_retraction_the_update_is_added_as_it_is(generator):
    master = orthonormal(8, 24, generator=generator)
    grad = torch.randn(8, 24, generator=generator)
    got, _ = muon.muon_factor_step(master, grad, torch.zeros(8, 24), lr=0.05, nesterov=False, retract="never")
    torch.testing.assert_close(got, master - 0.05 * muon.orthogonalize(grad), rtol=0, atol=1e-6)
    assert muon.orthonormality_error(got) > 1e-4


def test_a_gradient_of_zero_moves_nothing(generator):
    master = orthonormal(8, 24, generator=generator)
    got, momentum = muon.muon_factor_step(master, torch.zeros(8, 24), torch.zeros(8, 24), lr=0.05)
    assert (got - master).abs().max() < 1e-6
    assert torch.equal(momentum, torch.zeros(8, 24))


def test_the_rate_may_be_a_device_scalar(generator):
    master, grad = orthonormal(8, 24, generator=generator), torch.randn(8, 24, generator=generator)
    by_float = muon.muon_factor_step(master, grad, torch.zeros(8, 24), lr=0.25)
    by_tensor = muon.muon_factor_step(master, grad, torch.zeros(8, 24), lr=torch.tensor(0.25))
    assert torch.equal(by_float[0], by_tensor[0])


def test_inactive_factors_and_their_momentum_come_back_bit_for_bit(generator):
    master = orthonormal(3, 8, 24, generator=generator)
    momentum = torch.randn(3, 8, 24, generator=generator)
    grad = torch.randn(3, 8, 24, generator=generator)
    grad[1] = torch.nan
    active = torch.tensor([True, False, True])
    got, mean = muon.muon_factor_step(master, grad, momentum, lr=0.05, active=active)
    assert torch.equal(got[1], master[1])
    assert torch.equal(mean[1], momentum[1])
    whole, whole_mean = muon.muon_factor_step(master[[0, 2]], grad[[0, 2]], momentum[[0, 2]], lr=0.05)
    assert (got[[0, 2]] - whole).abs().max() < 1e-6
    assert torch.equal(mean[[0, 2]], whole_mean)


REFUSED = [
    ({"master": torch.eye(4, 8, dtype=torch.bfloat16)}, TypeError, "master is torch.bfloat16; pass the float32 master"),
    ({"grad": torch.zeros(4, 7)}, ValueError, r"grad is \[4, 7\] but master is \[4, 8\]"),
    ({"momentum": torch.zeros(1, 4, 8)}, ValueError, r"momentum is \[1, 4, 8\] but master is \[4, 8\]"),
    ({"retract": "always"}, ValueError, "retract is 'always'; pass 'step' or 'never'"),
    ({"active": torch.ones(3, dtype=torch.bool)}, ValueError, r"active is torch.bool \[3\]; pass bool \[\]"),
    ({"active": torch.tensor(1)}, ValueError, r"active is torch.int64 \[\]; pass bool \[\]"),
    ({"steps": 9}, ValueError, "steps is 9; pass one of 3, 4, 5"),
]


@pytest.mark.parametrize(("spoiled", "error", "message"), REFUSED)
def test_a_step_refuses_what_does_not_fit(spoiled, error, message):
    good: dict[str, Any] = {
        "master": torch.eye(4, 8),
        "grad": torch.zeros(4, 8),
        "momentum": torch.zeros(4, 8),
        "lr": 0.1,
    }
    with pytest.raises(error, match=message):
        muon.muon_factor_step(**{**good, **spoiled})
