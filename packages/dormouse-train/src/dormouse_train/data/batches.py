"""Which bytes make a batch: a pure function of seed, step, rank and world size, in constant memory.

The data is cut into `n` windows of `seq` bytes. In an epoch each window is read once, in an order that is a keyed
permutation of 0..n-1 (a Feistel network over the next even power of two, walked until it falls below n), and all
windows of the epoch are shifted by one offset below `seq`, so that a byte meets every position of a row over time. The
cursor is the step number: nothing is saved, and a resume at any step reads what an uninterrupted run would have read.
"""

from __future__ import annotations

import numpy as np

from dormouse_train.data.corpus import ByteView
from dormouse_train.errors import UserError

ROUNDS = 6
ORDER, OFFSET = 1, 2  # what a hash is for: keys of the order and shifts must not be related


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
        if not 0 <= micro < accumulate:
            raise ValueError(f"micro: got {micro} of {accumulate} micro-batches; give one of 0..{accumulate - 1}")
        first = ((step * self.world_size + self.rank) * accumulate + micro) * self.batch
        rows = np.arange(first, first + self.batch, dtype=np.uint64)
        epoch, index = rows // np.uint64(self.windows), rows % np.uint64(self.windows)
        window = permuted(index, self.windows, self.seed, epoch)
        offset = _hash(self.seed, epoch, OFFSET) % np.uint64(self._offsets)
        return [int(start) for start in window * np.uint64(self.seq) + offset]

    def epoch(self, step: int, accumulate: int = 1) -> float:
        """How often the data has been read when `step` steps are done."""
        return step * self.batch * accumulate * self.world_size / self.windows


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
