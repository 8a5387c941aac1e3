"""The four named configurations: exact ledgers, and the shapes that the design asks for."""

from __future__ import annotations

import pytest
import torch
from dormouse_model import Dormouse, ledger
from dormouse_model.config import ModelConfig, named_configs, read_config, validate

LEDGERS = {
    "nano": {"total": 990_243, "banks": 325_856, "active": 296_131, "touched": 1_087_141},
    "small": {"total": 9_242_150, "banks": 6_267_040, "active": 1_404_806, "touched": 14_699_435},
    "medium": {"total": 150_514_069, "banks": 99_041_600, "active": 17_406_581, "touched": 227_180_425},
    "b1": {"total": 1_066_325_409, "banks": 628_293_952, "active": 43_079_041, "touched": 1_332_028_321},
}


def config(name: str) -> ModelConfig:
    return validate(ModelConfig, read_config(name))


def tables(name: str) -> int:
    return sum(config(name).engram.sizes) * config(name).engram.dim


def test_there_are_four_of_them():
    assert set(named_configs()) == set(LEDGERS)


@pytest.mark.parametrize("name", LEDGERS)
def test_their_ledgers_are_exact(name):
    assert ledger(name) == LEDGERS[name]


@pytest.mark.parametrize("name", LEDGERS)
def test_they_build_on_the_meta_device_with_a_table_for_two_three_and_four_bytes(name):
    model = Dormouse(config(name), device="meta")
    assert all(p.is_meta for p in [*model.parameters(), *model.buffers()])
    engram = model.block.memory.engram
    assert engram is not None
    assert engram.config.orders == (2, 3, 4)
    assert engram.tables.shape == (sum(config(name).engram.sizes), 32)


@pytest.mark.parametrize("name", LEDGERS)
def test_the_ffn_is_eight_thirds_of_the_model(name):
    assert config(name).experts.d_ffn == 8 * config(name).model.d_model // 3


def test_their_sizes_are_those_that_were_asked_for():
    totals = {name: counts["total"] for name, counts in LEDGERS.items()}
    assert 500_000 <= totals["nano"] <= 1_000_000
    assert abs(totals["small"] - 9_200_000) <= 0.05 * 9_200_000
    assert tables("small") <= totals["small"] / 4
    assert abs(totals["medium"] - 150_000_000) <= 0.02 * 150_000_000
    assert abs(totals["b1"] - 1_066_354_113) <= 0.01 * 1_066_354_113
    assert abs(tables("b1") - 400_000_000) <= 0.01 * 400_000_000


def test_b1_has_the_studies_shape_and_indexes_pairs_of_bytes_exactly():
    b1 = config("b1")
    assert (b1.model.d_model, b1.model.num_heads, b1.model.head_dim, b1.model.iterations) == (2048, 32, 64, 2)
    experts = b1.experts
    assert (experts.num_experts, experts.top_k, experts.rank, experts.shared_rank) == (1024, 2, 64, 192)
    assert (experts.d_ffn, experts.d_ffn_padded) == (5461, 5472)
    assert b1.engram.sizes == (65_536, 6_178_000, 6_178_000)


def test_small_fills_itself_as_nano_does():
    """Every parameter is finite, factors are orthonormal, and the first loss is that of a model that knows nothing."""
    model = Dormouse(config("small"))
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    with torch.no_grad():
        logits = model(torch.randint(0, 256, (1, 70), generator=torch.Generator().manual_seed(0))).logits
    assert abs(float(logits.softmax(-1).log2().mean()) + 8) < 0.3
