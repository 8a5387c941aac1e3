"""The table of configurations on the model's page is what the code counts."""

from __future__ import annotations

from dormouse_model import ledger
from dormouse_model.config import ModelConfig, named_configs, read_config, validate
from pages import ROOT


def row(name: str) -> str:
    config, counts = validate(ModelConfig, read_config(name)), ledger(name)
    model, experts, engram = config.model, config.experts, config.engram
    numbers = [sum(engram.sizes) * engram.dim, *(counts[key] for key in ("total", "banks", "active", "touched"))]
    cells = [
        f"`{name}`",
        f"{model.d_model}",
        f"{model.num_heads} x {model.head_dim}",
        f"{experts.num_experts} of rank {experts.rank}",
        f"{experts.d_ffn}",
        *(f"{number:,}" for number in numbers),
    ]
    assert (experts.top_k, model.iterations) == (2, 2)
    return f"| {' | '.join(cells)} |"


def test_the_page_lists_every_configuration_with_its_ledger():
    shown = [line for line in (ROOT / "docs/model.md").read_text().splitlines() if line.startswith("| `")]
    assert sorted(shown) == sorted(row(name) for name in named_configs())
