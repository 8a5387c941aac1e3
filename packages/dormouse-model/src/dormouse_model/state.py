"""What a sequence leaves behind: enough to continue it without its bytes.

Letters: `B` sequences, `H` heads of size `K`, `W` taps of the short convolutions, `L` iterations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KDAState:
    """One iteration's memory of the past.

    `recurrent` [B, H, K, K] fp32 (keys by values); `tails` [B, W-1, 3 H K], the last inputs of the short convolutions
    of q, k and v, one beside the other.
    """

    recurrent: Tensor
    tails: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> KDAState:
        """The state with `function` applied to each tensor."""
        return KDAState(*(function(t) for t in self.tensors()))

    def tensors(self) -> tuple[Tensor, Tensor]:
        """The tensors in the order of the fields."""
        return self.recurrent, self.tails


@dataclass(frozen=True)
class State:
    """The past of `B` sequences: one `KDAState` an iteration.

    The state of iteration i belongs to iteration i of the *next* bytes. Handing it to iteration i+1 of the same bytes
    would let the first byte read the last one.
    """

    iterations: tuple[KDAState, ...]

    @property
    def batch_size(self) -> int:
        """B."""
        return self.iterations[0].recurrent.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes held; independent of how long the past is."""
        return sum(t.nbytes for iteration in self.iterations for t in iteration.tensors())

    def map(self, function: Callable[[Tensor], Tensor]) -> State:
        """The state with `function` applied to each tensor."""
        return State(tuple(iteration.map(function) for iteration in self.iterations))

    def detach(self) -> State:
        """The same values with no gradient into the past: truncated back-propagation through time."""
        return self.map(Tensor.detach)

    def clone(self) -> State:
        """A copy that shares no memory."""
        return self.map(Tensor.clone)

    def to(self, device: torch.device | str) -> State:
        """The state on `device`."""
        return self.map(lambda t: t.to(device))
