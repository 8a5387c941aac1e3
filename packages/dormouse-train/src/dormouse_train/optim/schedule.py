"""The rate of a step as a fraction of the peak: linear warm-up, then WSD (warm-up, stable, decay) or cosine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dormouse_train.config import TrainSection


def rate(step: int, train: TrainSection) -> float:
    """Fraction in (0, 1] of every group's peak rate for the update number `step`, counted from 0.

    A pure function of the configuration, so that a resumed run has the rates of an uninterrupted one. Linear warm-up
    over `warmup` steps; then `wsd` holds the peak until `decay_begins` and falls linearly, the last step having the
    last non-zero value; `cosine` falls along half a wave from the end of the warm-up. 0 from `train.steps` on.
    """
    if step >= train.steps:
        return 0.0
    warm = (step + 1) / train.warmup if step < train.warmup else 1.0
    begins = train.decay_begins
    if begins is None:
        if train.schedule != "cosine":
            raise ValueError(f"rate: train.schedule '{train.schedule}' has no rates here; use wsd or cosine")
        done = max(0, step - train.warmup) / max(1, train.steps - train.warmup)
        return warm * 0.5 * (1.0 + math.cos(math.pi * done))
    return min(warm, (train.steps - step) / max(1, train.steps - begins))
