"""dormouse-model: byte-level language models with many tiny experts and linear attention.

The names below are loaded on first use, so that `import dormouse_model.config` imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dormouse_model.config import ModelConfig
    from dormouse_model.generation import generate
    from dormouse_model.model import Dormouse, Output
    from dormouse_model.parameter_ledger import Ledger, ledger
    from dormouse_model.state import State
    from dormouse_model.weights import export, load

__all__ = ["Dormouse", "Ledger", "ModelConfig", "Output", "State", "export", "generate", "ledger", "load"]

_HOMES = {
    "Dormouse": "model",
    "Ledger": "parameter_ledger",
    "ModelConfig": "config",
    "Output": "model",
    "State": "state",
    "export": "weights",
    "generate": "generation",
    "ledger": "parameter_ledger",
    "load": "weights",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dormouse_model' has no attribute '{name}'")
    return getattr(importlib.import_module(f"dormouse_model.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
