"""What a sequence leaves behind: enough to continue it without its bytes.

Letters: `B` sequences, `H` heads of size `K`, `W` taps of the short convolutions, `d` model, `m` bytes of context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dormouse_model.engram.ngrams import NONE


@dataclass(frozen=True)
class KDAState:
    """What the mixer of one iteration remembers.

    `recurrent` [B, H, K, K] fp32 (keys by values); `tails` [B, W-1, 3 H K], the last inputs of the short convolutions
    of q, k and v, one beside the other.
    """

    recurrent: Tensor
    tails: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> KDAState:
        """The state with `function` applied to each tensor."""
        return KDAState(function(self.recurrent), function(self.tails))

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors in the order of the fields."""
        return self.recurrent, self.tails


@dataclass(frozen=True)
class SDPAState:
    """What softmax attention remembers in KDA's place: everything, so that it grows with the past of S bytes.

    `keys`, `values` [B, S, H, K]; `seen` [B, S] bool, false where a byte was before a sequence's start; `tails` as in
    `KDAState`.
    """

    keys: Tensor
    values: Tensor
    seen: Tensor
    tails: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> SDPAState:
        """The state with `function` applied to each tensor."""
        return SDPAState(*(function(t) for t in self.tensors()))

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors in the order of the fields."""
        return self.keys, self.values, self.seen, self.tails


@dataclass(frozen=True)
class IterationState:
    """One iteration's memory of the past: its mixer's, and the tail [B, W-1, d] of Engram's convolution if any."""

    mixer: KDAState | SDPAState
    engram: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> IterationState:
        """The state with `function` applied to each tensor."""
        return IterationState(self.mixer.map(function), None if self.engram is None else function(self.engram))

    def tensors(self) -> tuple[Tensor, ...]:
        """The mixer's tensors, then Engram's."""
        return self.mixer.tensors() + (() if self.engram is None else (self.engram,))


@dataclass(frozen=True)
class State:
    """The past of `B` sequences: one `IterationState` an iteration, and once the last bytes.

    The state of iteration i belongs to iteration i of the *next* bytes. Handing it to iteration i+1 of the same bytes
    would let the first byte read the last one. `last_bytes` [B, m] int16, -1 before a sequence's start; None without
    Engram.
    """

    iterations: tuple[IterationState, ...]
    last_bytes: Tensor | None = None

    @property
    def batch_size(self) -> int:
        """B."""
        return self.tensors()[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes held; with KDA independent of how long the past is."""
        return sum(t.nbytes for t in self.tensors())

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor: of each iteration in turn, then the last bytes."""
        held = tuple(t for iteration in self.iterations for t in iteration.tensors())
        return held if self.last_bytes is None else (*held, self.last_bytes)

    def map(self, function: Callable[[Tensor], Tensor]) -> State:
        """The state with `function` applied to each tensor."""
        last_bytes = None if self.last_bytes is None else function(self.last_bytes)
        return State(tuple(iteration.map(function) for iteration in self.iterations), last_bytes)

    def detach(self) -> State:
        """The same values with no gradient into the past: truncated back-propagation through time."""
        return self.map(Tensor.detach)

    def clone(self) -> State:
        """A copy that shares no memory."""
        return self.map(Tensor.clone)

    def to(self, device: torch.device | str) -> State:
        """The state on `device`."""
        return self.map(lambda t: t.to(device))

    def reset(self, rows: Tensor) -> State:
        """The state in which the sequences where `rows` [B] bool is true are at their start; the others keep theirs.

        Values and gradients of a reset sequence's past are cut off, a NaN included. No device is read.
        """
        if rows.dtype != torch.bool or rows.shape != (self.batch_size,):
            raise ValueError(
                f"State.reset: rows is {rows.dtype} {list(rows.shape)}; pass bool [{self.batch_size}], one a sequence"
            )

        def cleared(held: Tensor) -> Tensor:
            nothing = NONE if held is self.last_bytes else 0
            return held.masked_fill(rows.view(-1, *(1,) * (held.dim() - 1)), nothing)

        return self.map(cleared)
