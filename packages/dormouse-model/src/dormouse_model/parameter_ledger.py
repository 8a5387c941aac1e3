"""How many parameters a configuration has and how they are used, counted without allocating any."""

from __future__ import annotations

from typing import NamedTuple

from dormouse_model.config import ModelConfig, read_config, validate
from dormouse_model.model import VOCABULARY, Dormouse


class Ledger(NamedTuple):
    """Counts of parameters; pad columns are none."""

    total: int
    banks: int
    """Factors and spectra of all experts, the shared one included."""
    active: int
    """Those that one byte meets in an iteration and outside the block: its embedding, top_k experts, what is dense."""
    touched: int
    """Those that a forward pass over a whole batch reads: the block once an iteration, everything else once."""


def ledger(config: ModelConfig | str) -> Ledger:
    """The ledger of a configuration, or of one that `read_config` finds by name or path."""
    if isinstance(config, str):
        tables = read_config(config)
        config = validate(ModelConfig, {name: tables[name] for name in ModelConfig.model_fields if name in tables})
    experts, width = config.experts, config.model.d_model
    counts = {name: p.numel() for name, p in Dormouse(config, device="meta").named_parameters()}
    counts["block.experts.down.weight"] = width * experts.d_ffn
    routed = sum(counts[f"block.experts.{name}"] for name in ("gate_up_proj", "v", "scale"))
    shared = sum(count for name, count in counts.items() if name.startswith("block.experts.shared."))
    block = sum(count for name, count in counts.items() if name.startswith("block."))
    total = sum(counts.values())
    idle = routed // experts.num_experts * (experts.num_experts - experts.top_k)
    return Ledger(
        total=total,
        banks=routed + shared,
        active=total - idle - (VOCABULARY - 1) * width,
        touched=total + block * (config.model.iterations - 1),
    )
