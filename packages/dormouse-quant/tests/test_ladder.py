"""The ladder's base: names, refusals, and the rung whose pack is the bank."""

import pytest
import torch
from dormouse_kernels.muon import join_master, split_master
from dormouse_quant import LADDER, rung


def test_the_ladder_goes_from_the_most_bytes_to_the_fewest():
    assert LADDER == ("none", "fp8", "nvfp4", "int4", "ternary", "sign")


def test_a_name_off_the_ladder_is_refused_with_the_list():
    with pytest.raises(
        ValueError, match="there is no 'fp4' on the ladder; pass one of none, fp8, nvfp4, int4, ternary, sign"
    ):
        rung("fp4")


@pytest.mark.parametrize("name", LADDER[1:])
def test_a_rung_that_is_not_built_is_refused_with_those_that_are(name):
    with pytest.raises(ValueError, match=f"rung: '{name}' is on the ladder but not built; pass one of none"):
        rung(name)


def test_a_rung_knows_its_name():
    assert rung("none").name == "none"


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (5461,), (4, 32, 48)])
def test_nbytes_is_exactly_what_the_pack_takes(shape):
    master = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    pack = rung("none").quantize(master)
    assert rung("none").nbytes(shape) == sum(tensor.nbytes for tensor in pack.values())


def test_b1_banks_take_the_bytes_that_the_design_says():
    """Of 628,293,952 expert parameters all but the scales, which are no factors: 1.256 GB in bf16."""
    routed = [(1024, 128, 2048), (1024, 5461, 64)]
    shared = [(384, 2048), (5461, 192)]
    scales = 1024 * 128 + 384
    assert sum(rung("none").nbytes(shape) for shape in routed + shared) == 2 * (628_293_952 - scales)


def test_pack_bank_and_high_half_are_the_same_bits():
    master = torch.randn(3, 8, 40, generator=torch.Generator().manual_seed(1))
    high, low = split_master(master)
    pack = rung("none").quantize(master)
    bank = rung("none").dequantize(pack)
    assert bank.dtype == torch.bfloat16
    assert torch.equal(bank.view(torch.int16), high.view(torch.int16))
    assert bank.data_ptr() == pack["high"].data_ptr()
    assert torch.equal(join_master(bank, low), master)


def test_quantising_a_bank_again_changes_nothing():
    none = rung("none")
    bank = none.dequantize(none.quantize(torch.randn(64, generator=torch.Generator().manual_seed(2))))
    assert torch.equal(none.dequantize(none.quantize(bank.float())), bank)


@pytest.mark.parametrize("master", [torch.zeros(4, 4), torch.full((4,), 1e-40), -torch.zeros(3)])
def test_zeros_and_denormals_stay_finite_and_zeros_stay_zero(master):
    bank = rung("none").dequantize(rung("none").quantize(master))
    assert bank.isfinite().all()
    assert torch.equal(bank == 0, master == 0)


@pytest.mark.parametrize("view", [lambda w: w[:, ::2], lambda w: w.mT, lambda w: w[1:3], lambda w: w[..., 3:7]])
def test_a_strided_master_packs_like_its_contiguous_copy(view):
    master = view(torch.randn(4, 8, 12, generator=torch.Generator().manual_seed(3)))
    assert not master.is_contiguous() or master.storage_offset()
    packed, copied = (rung("none").quantize(w)["high"] for w in (master, master.contiguous()))
    assert torch.equal(packed, copied)


def test_a_master_that_is_no_fp32_is_refused():
    with pytest.raises(TypeError, match=r"master is torch.bfloat16; pass the float32 master"):
        rung("none").quantize(torch.zeros(2, dtype=torch.bfloat16))


def test_a_foreign_pack_is_refused():
    none = rung("none")
    with pytest.raises(ValueError, match=r"the pack holds \['codes', 'high'\]; rung 'none' packs only 'high'"):
        none.dequantize({"high": torch.zeros(1, dtype=torch.bfloat16), "codes": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"the pack holds \[\]"):
        none.dequantize({})
    with pytest.raises(TypeError, match=r"'high' is torch.float32; pass the bfloat16 half"):
        none.dequantize({"high": torch.zeros(1)})
