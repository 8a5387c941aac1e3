"""How many parameters a configuration has and how they are used, counted without allocating any."""

from __future__ import annotations

from typing import TypedDict

from dormouse_model.config import ModelConfig, read_config, validate
from dormouse_model.model import VOCABULARY, Dormouse

_ROUTED = ("gate_up_proj", "v", "scale", "swiglu.gate_up_proj", "swiglu.down_proj")
_ONCE = ("tables", "key.weight", "value.weight", "key_norm.weight")
"""What of Engram is read once a pass, for all iterations."""


class Ledger(TypedDict):
    """Counts of parameters; pad columns are none.

    `total`: all, Engram's tables among them wherever they live. `banks`: factors and spectra of all experts, the shared
    one included, or the weights of SwiGLU experts. `active`: those that one byte meets in an iteration and outside the
    block: its embedding, `top_k` experts, a row an order of Engram, all that is dense. `touched`: those that a forward
    pass over a whole batch reads, the block once an iteration and everything else once; of Engram's tables what one
    byte reads, as a batch leaves most of a large table alone.
    """

    total: int
    banks: int
    active: int
    touched: int


def dense_difference(config: ModelConfig) -> int:
    """Parameters that a model has more with `experts.kind = "dense"` than with `"tsct"`: what a whole width leaves."""
    experts, width = config.experts, config.model.d_model
    return experts.swiglu_parameters(width, experts.swiglu_widths(width)[0]) - experts.tsct_parameters(width)


def ledger(config: ModelConfig | str) -> Ledger:
    """The ledger of a configuration, or of one that `read_config` finds by name or path."""
    if isinstance(config, str):
        tables = read_config(config)
        config = validate(ModelConfig, {name: tables[name] for name in ModelConfig.model_fields if name in tables})
    experts, width = config.experts, config.model.d_model
    counts = {name: p.numel() for name, p in Dormouse(config, device="meta").named_parameters()}
    if experts.kind == "tsct":
        counts["block.experts.down.weight"] = width * experts.d_ffn
    routed = sum(counts.get(f"block.experts.{name}", 0) for name in _ROUTED)
    shared = sum(count for name, count in counts.items() if name.startswith("block.experts.shared"))
    engram = config.engram
    unread = (sum(engram.sizes) - len(engram.sizes)) * engram.dim
    once = sum(counts.get(f"block.memory.engram.{name}", 0) for name in _ONCE)
    block = sum(count for name, count in counts.items() if name.startswith("block.")) - once
    total = sum(counts.values())
    idle = routed // experts.num_experts * (experts.num_experts - experts.top_k)
    return Ledger(
        total=total,
        banks=routed + shared,
        active=total - idle - unread - (VOCABULARY - 1) * width,
        touched=total - unread + block * (config.model.iterations - 1),
    )
