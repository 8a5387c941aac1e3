"""Split masters: the bf16 half that the forward pass reads, the low half beside it, and the rows convention."""

from __future__ import annotations

import pytest
import torch
from dormouse_kernels import muon
from dormouse_model import Dormouse
from dormouse_model.factors import Factor

FACTORS = {
    "block.experts.gate_up_proj": ((5, 8, 24), (5, 2, 4, 24)),
    "block.experts.v": ((5, 37, 4), (5, 4, 37)),
    "block.experts.shared.gate_up_proj": ((12, 24), (2, 6, 24)),
    "block.experts.shared.v": ((37, 6), (6, 37)),
}


def test_the_factors_are_the_bf16_parameters_with_an_int16_half_beside_them(tiny):
    parameters, buffers = dict(tiny.named_parameters()), dict(tiny.named_buffers())
    assert {f.name: (tuple(f.high.shape), tuple(f.rows(f.high).shape)) for f in tiny.factors()} == FACTORS
    assert {n for n, p in parameters.items() if p.dtype == torch.bfloat16} == set(FACTORS)
    for factor in tiny.factors():
        assert factor.high is parameters[factor.name]
        assert factor.low is buffers[f"{factor.name}_low"]
        assert factor.low.dtype == torch.int16


def test_rows_of_u_and_of_its_twin_stand_apart(tiny):
    factor = tiny.factors()[0]
    rows = factor.rows(factor.master())
    assert torch.equal(rows[3, 0], factor.master()[3, :4])
    assert torch.equal(rows[3, 1], factor.master()[3, 4:])


def test_rows_are_views_that_unrows_undoes(tiny):
    for factor in tiny.factors():
        master = factor.master()
        rows = factor.rows(master)
        assert torch.equal(factor.unrows(rows), master)
        rows.mul_(2)
        assert torch.equal(factor.unrows(rows), master)


def test_a_master_is_written_and_read_to_the_last_bit_and_the_bank_is_its_high_half(tiny):
    source = torch.Generator().manual_seed(0)
    for factor in tiny.factors():
        held = factor.high
        master = torch.randn(factor.high.shape, generator=source)
        factor.set_master(master)
        assert factor.high is held
        assert torch.equal(factor.master(), master)
        assert float((factor.high.detach().float() - master).abs().max()) <= 2**-8 * float(master.abs().max())


def test_the_forward_pass_reads_the_high_halves_alone(tiny, bytes_of):
    ids = bytes_of(1, 9)
    before = tiny(ids).logits
    for factor in tiny.factors():
        factor.low.fill_(77)
    assert torch.equal(tiny(ids).logits, before)


def test_a_master_of_another_shape_or_dtype_is_refused(tiny):
    factor = tiny.factors()[1]
    with pytest.raises(ValueError, match=r"block\.experts\.v must be fp32 \(5, 37, 4\).*use unrows\(\)"):
        factor.set_master(factor.rows(factor.master()))
    with pytest.raises(ValueError, match=r"got torch\.bfloat16"):
        factor.set_master(factor.high.detach())


def test_a_cast_model_has_no_masters_and_says_so(tiny):
    with pytest.raises(TypeError, match="do not cast it"):
        tiny.double().factors()[0].master()


def test_factors_start_orthonormal_and_retraction_leaves_them_alone(tiny):
    for factor in tiny.factors():
        rows = factor.rows(factor.master())
        assert float(muon.orthonormality_error(rows).max()) < 1e-5, factor.name
        assert float((muon.retract(rows) - rows).abs().max()) < 1e-6, factor.name


def test_gradients_come_back_in_the_bank_s_dtype(tiny, bytes_of):
    tiny(bytes_of(2, 9)).logits.square().mean().backward()
    for factor in tiny.factors():
        assert factor.high.grad is not None
        assert factor.high.grad.dtype == torch.bfloat16
        assert bool((factor.high.grad != 0).any())


def by_data(factor, master):
    high, low = muon.split_master(master)
    factor.high.data.copy_(high)
    factor.low.copy_(low)


def by_copy(factor, master):
    with torch.no_grad():
        factor.high.copy_(muon.split_master(master)[0])


def by_swap(factor, master):
    factor.high.data = muon.split_master(master)[0]


@pytest.mark.parametrize("write", [Factor.set_master, by_data, by_copy, by_swap])
def test_however_a_bank_is_written_the_next_forward_reads_it(write, tiny, tiny_config, bytes_of):
    fresh, ids = Dormouse(tiny_config(), seed=5), bytes_of(2, 20)
    rest = {name: p for name, p in tiny.state_dict().items() if p.dtype == torch.float32}
    fresh.load_state_dict(rest, strict=False)
    before = tiny(ids).logits
    for mine, theirs in zip(tiny.factors(), fresh.factors(), strict=True):
        write(mine, theirs.master())
    assert not torch.equal(before, fresh(ids).logits)
    assert torch.equal(tiny(ids).logits, fresh(ids).logits)
    tiny.load_state_dict(Dormouse(tiny_config(), seed=7).state_dict())
    assert torch.equal(tiny(ids).logits, Dormouse(tiny_config(), seed=7)(ids).logits)
