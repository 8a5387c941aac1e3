"""The fixture of the proof tables, so that these tests also run without their plugin."""

from dormouse_kernels.proof import proof

__all__ = ["proof"]
