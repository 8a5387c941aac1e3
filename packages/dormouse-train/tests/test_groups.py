"""Groups: every parameter of the model in exactly one, by its name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dormouse_model import Dormouse
from dormouse_train.config import load_config
from dormouse_train.optim.groups import RULES, Rule, assign
from torch import nn

TINY = str(Path(__file__).parent / "tiny.toml")


@pytest.fixture(scope="module")
def model() -> Dormouse:
    return Dormouse(load_config(TINY).architecture)


@pytest.fixture(scope="module")
def arms() -> list[Dormouse]:
    """The models that are compared with it."""
    return [
        Dormouse(load_config(TINY, [arm]).architecture)
        for arm in ("experts.kind=dense", "model.mixer=sdpa", "engram.enabled=false")
    ]


def test_every_parameter_of_the_model_is_in_exactly_one_group(model: Dormouse, arms: list[Dormouse]) -> None:
    for each in (model, *arms):
        names = [name for group in assign(each.named_parameters()) for name in group.parameters]
        assert sorted(names) == sorted(name for name, _ in each.named_parameters())


def test_no_rule_is_without_a_parameter(model: Dormouse, arms: list[Dormouse]) -> None:
    names = {name for each in (model, *arms) for name, _ in each.named_parameters()}
    assert [group.rule for group in assign(model.named_parameters())] == [r for r in RULES if r.name != "experts"]
    for rule in RULES:
        for pattern in rule.patterns:
            alone = Rule("alone", "adamw", (pattern,))
            assert any(map(alone.claims, names)), pattern


def test_muon_gets_the_factors_and_the_dense_matrices_and_nothing_else(model: Dormouse) -> None:
    methods = {name: group.rule.method for group in assign(model.named_parameters()) for name in group.parameters}
    experts = [f"block.experts.{part}{bank}" for part in ("", "shared.") for bank in ("gate_up_proj", "v")]
    assert {name for name, method in methods.items() if method == "factor"} == set(experts)
    assert {name for name, method in methods.items() if method == "muon"} == {
        "readout.weight",
        "block.memory.weight",
        "block.memory.engram.key.weight",
        "block.memory.engram.value.weight",
        "block.experts.down.weight",
        *(f"block.kda.{part}_proj.weight" for part in "qkvo"),
    }
    assert {name for name, method in methods.items() if method == "sparse"} == {"block.memory.engram.tables"}


def test_only_dense_matrices_decay() -> None:
    assert {rule.name for rule in RULES if rule.decays} == {"mixer", "dense"}


def test_a_parameter_that_no_rule_claims_is_named() -> None:
    parameter = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"no rule claims the parameter 'block\.extra\.weight'"):
        assign([("block.extra.weight", parameter)])


def test_a_name_is_claimed_whole_not_by_its_end() -> None:
    with pytest.raises(ValueError, match="no rule claims"):
        assign([("other.head.weight", nn.Parameter(torch.zeros(2)))])


def test_a_parameter_that_two_rules_claim_is_refused() -> None:
    rules = (Rule("a", "adamw", ("x.*",)), Rule("b", "muon", (".*y",)))
    with pytest.raises(ValueError, match="a and b both claim 'xy'"):
        assign([("xy", nn.Parameter(torch.zeros(2)))], rules)


def test_a_frozen_parameter_is_in_no_group() -> None:
    assert assign([("head.weight", nn.Parameter(torch.zeros(2), requires_grad=False))]) == []
