"""dormouse-train: trains dormouse models on one GPU or one CPU.

The names below are loaded on first use, so that the command line can print help without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dormouse_train.config import Config, load_config
    from dormouse_train.loop import Result
    from dormouse_train.start import train

__all__ = ["Config", "Result", "load_config", "train"]

_HOMES = {"Config": "config", "Result": "loop", "load_config": "config", "train": "start"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dormouse_train' has no attribute '{name}'")
    return getattr(importlib.import_module(f"dormouse_train.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
