"""How far a run is: the part `progress` of its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dormouse_kernels import Counters

from dormouse_train.errors import UserError


class Progress:
    """Steps, skips, bytes and seconds of a run over all its sessions, and its `counters`."""

    def __init__(self, counters: Counters) -> None:
        self.step = 0
        """Steps done, skipped ones among them: the cursor of the data."""
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.bytes_seen = 0
        self.seconds = 0.0
        """Spent in steps."""
        self._counters = counters

    def add(self, *, skipped: bool, nbytes: int, seconds: float) -> None:
        """Count one step."""
        self.step += 1
        self.bytes_seen += nbytes
        self.seconds += seconds
        self.skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0

    def refuse_endless_skips(self, allowed: int) -> None:
        """`UserError` once more than `allowed` steps in a row were skipped: nothing is being learned any more."""
        if self.skipped_in_a_row > allowed:
            raise UserError(
                f"train: the loss or the gradient was not finite in {self.skipped_in_a_row} steps in a row, up to step "
                f"{self.step}, and train.max_skipped is {allowed}; start a new run "
                "with a lower train.lr or a longer train.warmup"
            )

    def state_dict(self) -> dict[str, Any]:
        """Plain values; the counters as two lists."""
        counted = self._counters.snapshot()
        return self._numbers() | {"counter_names": list(counted), "counter_values": list(counted.values())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        for key in self._numbers():
            setattr(self, key, state[key])
        self._counters.load(dict(zip(state["counter_names"], state["counter_values"], strict=True)))

    def _numbers(self) -> dict[str, int | float]:
        return {key: value for key, value in vars(self).items() if not key.startswith("_")}
