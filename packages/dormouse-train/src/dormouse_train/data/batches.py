"""Which bytes make a batch: a pure function of seed, step, rank and world size, in constant memory.

The data is cut into `n` windows of `seq` bytes. In an epoch each window is read once, in an order that is a keyed
permutation of 0..n-1 (a Feistel network over the next even power of two, walked until it falls below n), and all
windows of the epoch are shifted by one offset below `seq`, so that a byte meets every position of a row over time. The
cursor is the step number: nothing is saved, and a resume at any step reads what an uninterrupted run would have read.

In a stream the windows are read in order by each row, and the rows begin evenly spread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dormouse_train.data.corpus import ByteView
from dormouse_train.errors import UserError

if TYPE_CHECKING:
    from dormouse_train.config import Config

ROUNDS = 6
ORDER, OFFSET, FIRST = 1, 2, 3  # what a hash is for: keys of the order and shifts must not be related


def open_batches(config: Config, view: ByteView) -> Batches:
    """The batches of `config` out of `view`, in its `data.order`. Errors: `UserError` where `view` is too short."""
    keys = config.train
    kind = Streams if config.data.order == "stream" else Batches
    batches = kind(view, batch=keys.batch, seq=keys.seq, seed=keys.seed)
    batches.starts(0, accumulate=keys.accumulate)  # refused here and not at the first step
    return batches


class Batches:
    """`Batches(view, batch=B, seq=T, seed=s).at(step)` is the `[B, T+1]` uint8 batch of `step`, counted from 0.

    Inputs are `[:, :-1]`, targets `[:, 1:]`. With `accumulate` micro-batches and `world_size` ranks a step reads
    `B * accumulate * world_size` consecutive rows of the epoch's order, each exactly once.

    Errors: `UserError` when `view` is too short for one row.
    """

    def __init__(self, view: ByteView, *, batch: int, seq: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        if len(view) < seq + 1:
            raise UserError(
                f"data: {len(view)} bytes are left to train on and one row of train.seq = {seq} needs {seq + 1}; "
                f"give at least {seq + 1} training bytes (besides the held-out ones) or lower train.seq"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank: got {rank} in a world of {world_size}; give one of 0..{world_size - 1}")
        self.view, self.batch, self.seq, self.seed = view, batch, seq, seed
        self.rank, self.world_size = rank, world_size
        self.windows = max(1, len(view) // seq - 1)
        self._offsets = min(seq, len(view) - self.windows * seq)

    def at(self, step: int, micro: int = 0, accumulate: int = 1) -> np.ndarray:
        """Micro-batch `micro` of `accumulate` of a step: `[batch, seq + 1]` uint8."""
        return np.stack([self.view.read(start, self.seq + 1) for start in self.starts(step, micro, accumulate)])

    def starts(self, step: int, micro: int = 0, accumulate: int = 1) -> list[int]:
        """Where the rows of that micro-batch begin in the view."""
        first = step * self.batch * accumulate * self.world_size
        rows = self._rows(micro, accumulate) + np.uint64(first)
        epoch, index = rows // np.uint64(self.windows), rows % np.uint64(self.windows)
        window = permuted(index, self.windows, self.seed, epoch)
        offset = _hash(self.seed, epoch, OFFSET) % np.uint64(self._offsets)
        return [int(start) for start in window * np.uint64(self.seq) + offset]

    def _rows(self, micro: int, accumulate: int) -> np.ndarray:
        """Which rows of the step, over all ranks and micro-batches, a micro-batch of this rank has: uint64."""
        if not 0 <= micro < accumulate:
            raise ValueError(f"micro: got {micro} of {accumulate} micro-batches; give one of 0..{accumulate - 1}")
        first = (self.rank * accumulate + micro) * self.batch
        return np.arange(first, first + self.batch, dtype=np.uint64)

    def begins(self, step: int, micro: int = 0, accumulate: int = 1) -> list[np.ndarray]:
        """Where in each row of that micro-batch something begins that does not go on what was read before.

        Ascending positions below `seq`, int64: of documents.
        """
        return [self.view.documents_in(start, self.seq) for start in self.starts(step, micro, accumulate)]

    def epoch(self, step: int, accumulate: int = 1) -> float:
        """How often the data has been read when `step` steps are done."""
        return step * self.batch * accumulate * self.world_size / self.windows


class Streams(Batches):
    """Batches whose row b at a step begins where row b of the step before ended.

    The data is a ring of `n` windows. With `R` rows a step, over all micro-batches and ranks, row b begins `b n / R`
    windows after a first window that the seed chooses, so that `n / R` steps read all windows once, give or take one.
    Where a row passes the end of the data it goes on at the beginning, the windows shifted by a new offset.

    Errors: `UserError`, of `starts`, where the data has fewer windows than a step has rows.
    """

    def __init__(self, view: ByteView, *, batch: int, seq: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(view, batch=batch, seq=seq, seed=seed, rank=rank, world_size=world_size)
        self.windows = (len(view) - 1) // seq
        self._offsets = len(view) - self.windows * seq

    def starts(self, step: int, micro: int = 0, accumulate: int = 1) -> list[int]:
        """Where the rows of that micro-batch begin in the view."""
        together = self.batch * accumulate * self.world_size
        if together > self.windows:
            raise UserError(
                f"data: {len(self.view)} training bytes have {self.windows} windows of train.seq = {self.seq} and with "
                f"data.order = 'stream' a step reads {together} rows (train.batch * train.accumulate) at different "
                f"places; give at least {together * self.seq + 1} bytes, or lower one of the three"
            )
        windows = np.uint64(self.windows)
        first = _hash(self.seed, np.zeros(1, dtype=np.uint64), FIRST) % windows
        at = self._rows(micro, accumulate) * windows // np.uint64(together) + first + np.uint64(step)
        turn, window = at // windows, at % windows
        offset = _hash(self.seed, turn, OFFSET) % np.uint64(self._offsets)
        return [int(start) for start in window * np.uint64(self.seq) + offset]

    def begins(self, step: int, micro: int = 0, accumulate: int = 1) -> list[np.ndarray]:
        """As in `Batches`, and the start of a row that came round to the beginning of the data."""
        found = []
        for start in self.starts(step, micro, accumulate):
            documents = self.view.documents_in(start, self.seq)
            found.append(np.union1d([0], documents) if start < self.seq else documents)
        return found


def permuted(index: np.ndarray, n: int, seed: int, epoch: np.ndarray) -> np.ndarray:
    """The image of each `index` (uint64, below `n`) under the permutation of 0..n-1 that `seed` and its `epoch` key."""
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = [_hash(seed, epoch, ORDER + (turn << 8)) for turn in range(ROUNDS)]
    image = index.copy()
    walking = np.ones(len(index), dtype=bool)
    while walking.any():
        left, right = image[walking] >> half, image[walking] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key[walking]) & mask)
        image[walking] = (left << half) | right
        walking = image >= np.uint64(n)
    return image


def _hash(seed: int, epoch: np.ndarray, purpose: int) -> np.ndarray:
    """64 bits for each epoch, unrelated between seeds, epochs and purposes."""
    keyed = _mix(np.full(len(epoch), seed, dtype=np.uint64)) ^ np.uint64(purpose)
    return _mix(_mix(keyed) + epoch)


def _mix(value: np.ndarray) -> np.ndarray:
    """SplitMix64's output function, a bijection of 64 bits (Steele, Lea, Flood: Fast splittable generators, 2014)."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
