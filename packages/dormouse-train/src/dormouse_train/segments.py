"""Rows read in segments that hand their state on, and the states that one step leaves to the next.

A segment is back-propagated as soon as it is read, so that memory is that of one segment, unless gradients are to
reach the segment before (`train.carry = "full"`). Where a state is handed on, a segment is cut at every place where a
document begins in one of its rows, and the state of that row is reset there: nothing of a document is known in the
next one.

Letters: `B` rows, `T` bytes of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from dormouse_model import State
from dormouse_model.loss import next_byte_loss
from torch import Tensor

if TYPE_CHECKING:
    from dormouse_model import Dormouse

    from dormouse_train.config import Config


@dataclass(frozen=True)
class Piece:
    """Bytes `start`..`stop - 1` of all rows; `begins` [B]: the rows in which a document begins at `start`."""

    start: int
    stop: int
    begins: tuple[bool, ...]


def cut(length: int, segment: int, begins: Sequence[np.ndarray]) -> Iterator[list[Piece]]:
    """The segments of rows of `length` bytes, each as the pieces that it is read in.

    `begins` has the positions of each row at which a document begins; without any a segment is one piece.
    """
    places = [{int(place) for place in row} for row in begins]
    for first in range(0, length, segment):
        last = min(first + segment, length)
        inside = {place for row in places for place in row if first < place < last}
        edges = [first, *sorted(inside), last]
        yield [Piece(start, stop, tuple(start in row for row in places)) for start, stop in pairwise(edges)]


@dataclass(frozen=True)
class Sums:
    """What a micro-batch measured: `cross_entropy` and `loss` [], means over its bytes; `expert_counts` [L, E]."""

    cross_entropy: Tensor
    loss: Tensor
    expert_counts: Tensor


def add_gradients(
    model: Dormouse, rows: Tensor, begins: Sequence[np.ndarray], state: State | None, config: Config
) -> tuple[Sums, State | None]:
    """Add to `.grad` the gradients of a micro-batch's loss divided by `train.accumulate`.

    `rows` [B, T+1] uint8, `begins` as in `cut`, `state` the past of the rows or None. Returns the sums and the state
    after the rows, without gradients; None where `train.carry` is `reset`. The loss is the mean over pieces, by their
    bytes: of the cross-entropy that of the whole row to rounding; of the balance loss, which is of what is routed
    together, a mean of pieces'.
    """
    keys, nats, counts = config.train, torch.zeros((), device=rows.device), torch.zeros((), dtype=torch.int64)
    loss, waiting = nats, nats
    for segment in cut(keys.seq, keys.segment or keys.seq, begins):
        if state is not None:
            state = {"reset": None, "tbptt": state.detach(), "full": state}[keys.carry]
        for piece in segment:
            if state is not None and any(piece.begins):
                state = state.reset(torch.tensor(piece.begins, device=rows.device))
            with model.autocast():
                out = model(rows[:, piece.start : piece.stop], state, return_state=keys.carry != "reset")
            state, share = out.state, (piece.stop - piece.start) / keys.seq
            part = next_byte_loss(out.logits, rows[:, piece.start + 1 : piece.stop + 1])
            waiting = waiting + share * (part + config.experts.balance_loss_coef * out.balance_loss)
            nats = nats + share * part.detach()
            counts = counts.to(rows.device) + out.expert_counts
        if keys.carry != "full" or piece.stop == keys.seq:
            (waiting / keys.accumulate).backward()
            loss, waiting = loss + waiting.detach(), torch.zeros_like(loss)
    return Sums(nats, loss, counts), None if state is None else state.detach()


class Carried:
    """The part `carried` of a checkpoint: the state of every row of a step, as the step before left it.

    Its tensors stay where they are: what is taken over is copied into them.
    """

    def __init__(self, model: Dormouse, batch: int, accumulate: int = 1) -> None:
        self._batch = batch
        # the first state shares its tensors between iterations
        self._state = model.init_state(batch * accumulate).clone()

    def before(self, micro: int) -> State:
        """The states of the rows of a micro-batch."""
        return self._state.select(slice(micro * self._batch, (micro + 1) * self._batch))

    def after(self, micro: int, state: State) -> None:
        """Keep `state` as that of the rows of a micro-batch; not before the backward of what has read the last one."""
        _copy(self.before(micro), state)

    def forget(self) -> None:
        """Bring all rows to their start."""
        _copy(self._state, self._state.reset(torch.ones(self._state.batch_size, dtype=torch.bool, device=self._device)))

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors by name, stacked over iterations."""
        return self._state.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Copy what `state_dict` gave."""
        _copy(self._state, State.from_state_dict(state_dict))

    @property
    def _device(self) -> torch.device:
        return self._state.tensors()[0].device


@torch.no_grad()
def _copy(into: State, state: State) -> None:
    for held, new in zip(into.tensors(), state.tensors(), strict=True):
        held.copy_(new)
