"""`explain` says what the op then does."""

from typing import Any

import pytest
import torch
from dormouse_kernels import Counters, explain, glu_experts
from dormouse_kernels.select import OPS

SHAPE: dict[str, Any] = {"T": 3, "k": 1, "num_experts": 2, "d": 4, "r": 5, "f": 4}


@pytest.mark.parametrize("implementation", ["auto", "reference", "padded"])
def test_the_explained_implementation_is_the_one_that_runs(implementation):
    choice = explain("glu_experts", **SHAPE, implementation=implementation)
    with Counters() as counters:
        glu_experts(
            torch.randn(3, 4), torch.randn(2, 10, 4), torch.randn(2, 4, 5), torch.zeros(3, 1, dtype=torch.int64),
            torch.ones(3, 1), implementation=implementation,
        )  # fmt: skip
    assert counters.snapshot() == {f"moe.glu_experts/forward/{choice.implementation}": 1}


@pytest.mark.parametrize("op_name", OPS)
def test_every_op_is_explained_on_any_device(op_name):
    for device in ("cpu", "cuda:1", torch.device("cuda", 0)):
        assert explain(op_name, **SHAPE, device=device, dtype=torch.bfloat16).reason


def test_an_unknown_op_is_refused_with_the_list():
    with pytest.raises(ValueError, match="op_name is 'gather'; pass one of latent_glu_experts, glu_experts"):
        explain("gather", **SHAPE)


def test_an_unknown_argument_is_refused():
    misspelt: dict[str, Any] = {**SHAPE, "dtyp": torch.float32}
    with pytest.raises(TypeError, match="dtyp"):
        explain("glu_experts", **misspelt)
