"""Which row of a table an n-gram of raw bytes has: a pure function of the bytes and a seed, in int64 alone.

Letters: `B` sequences, `T` bytes, `n` the order of an n-gram, `m` the longest order minus one.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

NONE = -1
"""Where a byte would stand before the start of its sequence, and the row of an n-gram that holds such a place."""
_POSITIVE = 2**63 - 1
# The finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): (shift, multiplier as a signed 64-bit number).
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))


def ngram_rows(ids: Tensor, before: Tensor, order: int, rows: int, seed: int) -> Tensor:
    """The row in `[0, min(rows, 256^n))` of the n-gram that ends at each byte, int64 [B, T].

    `ids` [B, T] bytes, `before` [B, m] the bytes that came before them, `NONE` where there was none, m >= n - 1. An
    n-gram that begins before its sequence has the row `NONE`. Where `256^n <= rows` the row is the n-gram itself, the
    current byte the lowest digit; otherwise `mix(n-gram xor salt) mod rows`, the salt a hash of seed and order. int64
    wraps alike on every device, so a CPU and a GPU read the same rows.
    """
    stream = torch.cat([before.long(), ids.long()], 1)
    last, length = before.shape[1], ids.shape[1]
    key = stream[:, last:]
    for back in range(1, order):
        key = key + stream[:, last - back : last - back + length] * 256**back
    begins = stream[:, last - order + 1 : last - order + 1 + length]
    row = key if 256**order <= rows else (mix(key ^ salt(seed, order)) & _POSITIVE).remainder(rows)
    return row.masked_fill(begins == NONE, NONE)


def mix(key: Tensor) -> Tensor:
    """A bijection of int64 in which every bit of `key` reaches every bit of the result."""
    for shift, multiplier in _ROUNDS:
        # `>>` of an int64 copies the sign; the mask makes it the shift of an unsigned number.
        key = (key ^ ((key >> shift) & (2 ** (64 - shift) - 1))) * multiplier
    return key


def salt(seed: int, order: int) -> int:
    """A signed 64-bit number that sets the hashes of two seeds, or of two orders, apart."""
    return int.from_bytes(hashlib.sha256(f"engram:{seed}:{order}".encode()).digest()[:8], "little", signed=True)
