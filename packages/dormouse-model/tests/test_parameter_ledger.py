from __future__ import annotations

import pytest
from dormouse_model import Dormouse, ledger
from dormouse_model.config import ModelConfig, validate

B1 = {
    "model": {"d_model": 2048, "num_heads": 32, "head_dim": 64, "iterations": 2},
    "experts": {"num_experts": 1024, "top_k": 2, "rank": 64, "shared_rank": 192, "d_ffn": 5461},
}


def test_the_banks_of_b1_are_the_design_s_number():
    assert ledger(validate(ModelConfig, B1))["banks"] == 628_293_952


def test_an_expert_of_b1_is_the_difference_that_one_more_makes():
    more = {**B1, "experts": {**B1["experts"], "num_experts": 1025}}
    one, two = (ledger(validate(ModelConfig, tables)) for tables in (B1, more))
    assert two["banks"] - one["banks"] == 611_776
    # and its row of the router
    assert two["total"] - one["total"] == 611_776 + 2048
    assert two["active"] - one["active"] == 2048


def test_the_total_is_what_a_model_holds_without_pad_columns(tiny_config):
    config = tiny_config()
    model = Dormouse(config)
    held = sum(p.numel() for p in model.parameters())
    assert ledger(config)["total"] == held - 24 * (48 - 37)
    assert ledger(config)["total"] == sum(t.numel() for n, t in model.state_dict().items() if not n.endswith("_low"))


@pytest.mark.parametrize("iterations", [1, 3])
def test_a_pass_reads_the_block_once_an_iteration(iterations, tiny_config):
    config = tiny_config(iterations=iterations)
    names = {name: p.numel() for name, p in Dormouse(config).block.named_parameters()}
    recall = ("tables", "key.weight", "value.weight", "key_norm.weight")
    block = sum(names.values()) - 24 * (48 - 37) - sum(names[f"memory.engram.{name}"] for name in recall)
    counts = ledger(config)
    # Of 256 + 300 + 300 rows of 8 a byte reads three.
    assert counts["touched"] == counts["total"] - (856 - 3) * 8 + (iterations - 1) * block


def test_a_byte_meets_one_embedding_and_top_k_experts(tiny_config):
    one, all_of_them = ledger(tiny_config(top_k=2)), ledger(tiny_config(top_k=5))
    expert = 8 * 24 + 37 * 4 + 8
    assert all_of_them["active"] - one["active"] == 3 * expert
    assert all_of_them["active"] == all_of_them["total"] - 255 * 24 - (856 - 3) * 8


def test_without_engram_a_model_is_smaller_by_engram_alone(tiny_config):
    with_it, without = ledger(tiny_config()), ledger(tiny_config(enabled=False))
    names = Dormouse(tiny_config()).block.memory.named_parameters()
    engram = sum(p.numel() for name, p in names if name.startswith("engram."))
    assert with_it["total"] - without["total"] == engram
    assert with_it["banks"] == without["banks"]
