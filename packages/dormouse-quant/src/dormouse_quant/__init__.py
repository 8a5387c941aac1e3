"""The ladder of storage formats for expert factors: from the bf16 bank down to a bit a parameter."""

from dormouse_quant.ladder import LADDER, Rung, rung

__all__ = ["LADDER", "Rung", "rung"]
