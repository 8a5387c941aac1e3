"""dormouse-train: trains dormouse models on one GPU or one CPU.

`train(config)` is loaded on first use, so that the command line can print help without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dormouse_train.start import train

__all__ = ["train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'dormouse_train' has no attribute '{name}'")
    from dormouse_train.start import train

    return train


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
