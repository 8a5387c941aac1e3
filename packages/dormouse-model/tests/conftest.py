"""A model small enough to be checked exhaustively: odd width of the experts, odd number of experts, three heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dormouse_model import Dormouse, ModelConfig
from dormouse_model.config import validate

TINY: dict[str, dict[str, Any]] = {
    "model": {"d_model": 24, "num_heads": 3, "head_dim": 8, "iterations": 2},
    "experts": {"num_experts": 5, "top_k": 2, "rank": 4, "shared_rank": 6, "d_ffn": 37},
    # One table indexed exactly and two hashed, with more n-grams than rows.
    "engram": {"enabled": True, "orders": [1, 2, 4], "rows": 300, "dim": 8},
}
HOMES = {"memory_max": "model", "mixer": "model", "allow_fallback": "kda"}
"""Sections of keys that the tiny configuration leaves at their defaults, where it is not `experts`."""


@pytest.fixture
def tiny_config() -> Callable[..., ModelConfig]:
    """The tiny configuration with keys changed: `tiny_config(top_k=1, iterations=3)`."""

    def make(**changes: Any) -> ModelConfig:
        tables = {section: dict(keys) for section, keys in TINY.items()} | {"kda": {}}
        for key, value in changes.items():
            section = next((name for name, keys in TINY.items() if key in keys), None)
            section = section or HOMES.get(key, "experts")
            tables[section][key] = value
        return validate(ModelConfig, tables)

    return make


@pytest.fixture
def tiny(tiny_config: Callable[..., ModelConfig]) -> Dormouse:
    """A tiny model whose head is large enough that logits differ by more than rounding."""
    return lively(Dormouse(tiny_config()))


def lively(model: Dormouse) -> Dormouse:
    """Gates away from zero, a head of usual size, tables and taps that say something: no path is nearly shut."""
    source = torch.Generator().manual_seed(1)
    engram = model.block.memory.engram
    bias = model.get_parameter(f"block.{model.config.model.mixer}.gate_up.bias")
    filled = [model.head.weight, model.block.controller.weight, bias]
    with torch.no_grad():
        for parameter in filled + ([] if engram is None else [engram.tables, engram.conv.weight]):
            parameter.copy_(torch.randn(parameter.shape, generator=source) * parameter.shape[-1] ** -0.5)
    return model


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random ids of `shape`, uint8."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def bytes_of() -> Callable[..., torch.Tensor]:
    """`bytes_of(B, T)`: random ids."""
    return random_bytes


@pytest.fixture
def enliven() -> Callable[[Dormouse], Dormouse]:
    """`lively`, for models that a test makes itself."""
    return lively
