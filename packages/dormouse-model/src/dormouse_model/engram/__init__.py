"""Engram (arXiv 2601.07372): tables of learned rows that the last few bytes look up, read through a gate."""

from dormouse_model.engram.layer import Engram, Recall

__all__ = ["Engram", "Recall"]
