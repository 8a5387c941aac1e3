"""Kimi Delta Attention (arXiv 2510.26692): linear attention with a per-channel decay and a delta rule."""

from dormouse_model.kda.layer import KDA

__all__ = ["KDA"]
