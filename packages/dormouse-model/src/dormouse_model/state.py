"""What a sequence leaves behind: enough to continue it without its bytes.

Letters: `B` sequences, `H` heads of size `K`, `W` taps of the short convolutions, `d` model, `m` bytes of context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
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

    def padded(self, length: int) -> SDPAState:
        """The same past with S = `length`: what is added stands before the start, where nothing is seen."""
        added = length - self.keys.shape[1]
        keys, values = (F.pad(t, (0, 0, 0, 0, added, 0)) for t in (self.keys, self.values))
        return SDPAState(keys, values, F.pad(self.seen, (added, 0)), self.tails)


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
        """The state with `function` applied to each tensor, in the order of `tensors`."""
        iterations = tuple(iteration.map(function) for iteration in self.iterations)
        return State(iterations, None if self.last_bytes is None else function(self.last_bytes))

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
            return held.masked_fill(rows.view(-1, *(1,) * (held.dim() - 1)), 0)

        last_bytes = None if self.last_bytes is None else self.last_bytes.masked_fill(rows.unsqueeze(-1), NONE)
        return State(tuple(iteration.map(cleared) for iteration in self.iterations), last_bytes)

    def select(self, rows: Sequence[int] | slice | Tensor) -> State:
        """The sequences `rows` of the batch, in that order: views of these for a slice, otherwise copies."""
        return self.map(lambda held: held[rows])

    @staticmethod
    def cat(states: Sequence[State]) -> State:
        """The sequences of several states of one model as one batch; softmax attention's pasts may differ in length."""
        first, *rest = _of_one_length(states)
        others = zip(*(state.tensors() for state in rest), strict=True)
        return first.map(lambda held: torch.cat([held, *next(others, ())]))

    def state_dict(self) -> dict[str, Tensor]:
        """The state as a few named tensors: the mixer's fields and `engram`, stacked [L, B, ...], and `last_bytes`."""
        mixers, tails = [i.mixer for i in self.iterations], [i.engram for i in self.iterations if i.engram is not None]
        packed = {field.name: torch.stack([getattr(m, field.name) for m in mixers]) for field in fields(mixers[0])}
        if tails:
            packed["engram"] = torch.stack(tails)
        return packed if self.last_bytes is None else packed | {"last_bytes": self.last_bytes}

    @staticmethod
    def from_state_dict(packed: Mapping[str, Tensor]) -> State:
        """What `state_dict` gave, as a state of views of it. Errors: `ValueError` for other names."""
        names = {kind: [field.name for field in fields(kind)] for kind in (KDAState, SDPAState)}
        kind = next((k for k, held in names.items() if packed.keys() - {"engram", "last_bytes"} == set(held)), None)
        if kind is None:
            raise ValueError(
                f"State.from_state_dict: got {', '.join(sorted(packed)) or 'nothing'}; give what state_dict returned"
            )
        mixers = [kind(*each) for each in zip(*(packed[name] for name in names[kind]), strict=True)]
        tails = packed["engram"] if "engram" in packed else [None] * len(mixers)
        return State(tuple(map(IterationState, mixers, tails)), packed.get("last_bytes"))

    def save(self, file: str | Path) -> None:
        """Write the state to `file`, safetensors of `state_dict`; `State.load` gives it back bit for bit."""
        save_file({name: held.detach().contiguous() for name, held in self.state_dict().items()}, file)

    @staticmethod
    def load(file: str | Path, *, device: torch.device | str = "cpu") -> State:
        """The state that `save` wrote to `file`, on `device`. Errors: `OSError`; `ValueError` for another file."""
        try:
            return State.from_state_dict(load_file(file, str(device)))
        except (SafetensorError, ValueError) as error:
            raise ValueError(f"State.load: {file} holds no state ({error}); give a file that save wrote") from None


def _of_one_length(states: Sequence[State]) -> list[State]:
    """`states`, the pasts of softmax attention made as long as the longest."""
    held = [[i.mixer.keys.shape[1] for i in state.iterations if isinstance(i.mixer, SDPAState)] for state in states]
    longest = max((length for lengths in held for length in lengths), default=0)

    def padded(iteration: IterationState) -> IterationState:
        mixer = iteration.mixer
        return IterationState(mixer.padded(longest) if isinstance(mixer, SDPAState) else mixer, iteration.engram)

    return [State(tuple(map(padded, state.iterations)), state.last_bytes) for state in states]
