"""What a byte model has to beat on the same bytes: n-gram models with Witten-Bell smoothing, and xz.

Letters: `h` a context (the bytes before), `w` the byte after it, `c(hw)` how often both were seen, `N(h)` how many
different bytes followed `h`.
"""

from __future__ import annotations

import lzma
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import chain
from threading import Event

import numpy as np

from dormouse_train.data import ByteView

MAX_CONTEXT = 6
"""Longest context in bytes; an n-gram of one byte more still fits a 64-bit key."""
FIT_LIMIT = 16 * 2**20
"""Most training bytes the baselines are fitted on: about 20 seconds of two cores; more is taken in even pieces."""
_PIECE = 2**20


@dataclass(frozen=True)
class Baselines:
    """Bits a held-out byte: `ngram[k]` with `k` bytes of context, `xz` with the training bytes as its dictionary."""

    ngram: list[float]
    xz: float
    fitted_bytes: int
    train_bytes: int
    window_bytes: int


def measure(
    train: ByteView, held: ByteView, *, limit: int = FIT_LIMIT, check: Callable[[], None] | None = None
) -> Baselines:
    """Baselines for all bytes of `held`, which is read a mebibyte at a time, fitted on at most `limit` of `train`.

    xz runs in two threads beside the n-gram counts (liblzma releases the interpreter's lock). `check` is called
    every few seconds at most; what it raises ends the measurement.
    """
    text = ByteView([take(train, limit)])
    given_up = Event()

    def going_on() -> None:
        if given_up.is_set():
            raise _GivenUpError

    with ThreadPoolExecutor(max_workers=2) as pool:
        alone = pool.submit(xz_bytes, _blocks(text), len(text), going_on)
        both = pool.submit(xz_bytes, chain(_blocks(text), _blocks(held)), len(text) + len(held), going_on)
        try:
            ngram = witten_bell(text.read(0, len(text)), held, check=check)
            while wait((alone, both), timeout=0.5).not_done:
                if check is not None:
                    check()
        except BaseException:
            given_up.set()
            raise
        xz = 8 * (both.result() - alone.result()) / len(held)
    return Baselines(ngram, xz, len(text), len(train), len(held))


class _GivenUpError(Exception):
    """Ends a thread whose result nobody waits for."""


def _blocks(view: ByteView) -> Iterator[np.ndarray]:
    for start in range(0, len(view), _PIECE):
        yield view.read(start, min(_PIECE, len(view) - start))


def take(view: ByteView, limit: int) -> np.ndarray:
    """All of `view` when it has at most `limit` bytes, else `limit` bytes in evenly spaced pieces of 1 MiB."""
    if len(view) <= limit:
        return view.read(0, len(view))
    pieces = max(1, limit // _PIECE)
    size = limit // pieces
    starts = np.linspace(0, len(view) - size, pieces).astype(np.int64)
    return np.concatenate([view.read(int(start), size) for start in starts])


def xz_bytes(blocks: Iterable[np.ndarray], nbytes: int, check: Callable[[], None] | None = None) -> int:
    """Size of the `nbytes` bytes of `blocks` as xz compresses them (preset 6, a window that spans up to 64 MiB)."""
    window = min(max(nbytes, 2**16), 2**26)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": window}]
    compressor = lzma.LZMACompressor(format=lzma.FORMAT_XZ, filters=filters)
    size = 0
    for block in blocks:
        if check is not None:
            check()
        size += len(compressor.compress(block.data))
    return size + len(compressor.flush())


def witten_bell(
    train: np.ndarray,
    held: ByteView,
    max_context: int = MAX_CONTEXT,
    *,
    block: int = _PIECE,
    check: Callable[[], None] | None = None,
) -> list[float]:
    """`p(w|h) = (c(hw) + N(h) p(w|h')) / (c(h) + N(h))`, h' one byte shorter; bits a byte of `held` for 0..max_context.

    Below the empty context stands the uniform distribution over 256 bytes; where `h` was never seen `p(w|h) = p(w|h')`.
    The first bytes of `held` have what context there is. `train` is uint8 `[n]`; `held` is scored `block` bytes at a
    time, which changes nothing but the memory that it takes.
    Errors: `ValueError` when either is empty or `max_context` is not in 0..6.
    Source: Witten and Bell, "The zero-frequency problem", IEEE Transactions on Information Theory 37 (1991), method C.
    """
    if len(train) == 0 or len(held) == 0:
        raise ValueError("witten_bell: train and held need at least one byte each; give longer data")
    if not 0 <= max_context <= MAX_CONTEXT:
        raise ValueError(f"witten_bell: max_context is {max_context}; use 0 to {MAX_CONTEXT}")
    tables = [_Table.of(grams, counts) for grams, counts in _ngram_tables(train, max_context, check)]
    bits = np.zeros(max_context + 1)
    for start in range(0, len(held), block):
        before = min(start, max_context)
        text = held.read(start - before, before + min(block, len(held) - start))
        probability = np.full(len(text), 1 / 256)
        for context, table in enumerate(tables):
            # Positions with less than `context` bytes before them keep the shorter context's probability.
            probability[context:] = table.interpolate(_keys(text, context + 1), probability[context:])
            bits[context] -= np.log2(probability[before:]).sum()
            if check is not None:
                check()
    return [float(each) for each in bits / len(held)]


def _keys(text: np.ndarray, n: int) -> np.ndarray:
    """The n-grams of `text` in order as int64, oldest byte in the highest place."""
    count = max(0, len(text) - n + 1)
    keys = np.zeros(count, dtype=np.int64)
    for i in range(n):
        np.left_shift(keys, 8, out=keys)
        np.bitwise_or(keys, text[i : i + count], out=keys)
    return keys


def _ngram_tables(
    train: np.ndarray, max_context: int, check: Callable[[], None] | None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For every context length the sorted distinct n-grams and their counts, from one sort of the longest."""
    grams, counts = np.unique(_keys(train, max_context + 1), return_counts=True)
    tables = [(grams, counts)]
    for n in range(max_context, 0, -1):
        if check is not None:
            check()
        # Dropping the oldest byte of every longer n-gram counts all n-grams but the one that begins the text.
        shorter = np.append(grams & ((1 << 8 * n) - 1), _keys(train[:n], n))
        weights = np.append(counts, np.ones(len(shorter) - len(grams), dtype=counts.dtype))
        grams, where = np.unique(shorter, return_inverse=True)
        counts = np.bincount(where, weights=weights, minlength=len(grams)).astype(np.int64)
        tables.append((grams, counts))
    return tables[::-1]


@dataclass(frozen=True)
class _Table:
    """The n-grams `hw` of one length with `c(hw)`, and their contexts `h` with `c(h)` and `N(h)`; each sorted."""

    grams: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    followers: np.ndarray

    @classmethod
    def of(cls, grams: np.ndarray, counts: np.ndarray) -> _Table:
        contexts, starts, followers = np.unique(grams >> 8, return_index=True, return_counts=True)
        totals = np.add.reduceat(counts, starts) if len(counts) else counts
        return cls(grams, counts, contexts, totals, followers)

    def interpolate(self, keys: np.ndarray, shorter: np.ndarray) -> np.ndarray:
        """`p(w|h)` for every `hw` of `keys`, given `p(w|h')`."""
        if len(self.grams) == 0 or len(keys) == 0:
            return shorter
        seen_gram = _look_up(self.grams, self.counts, keys)
        seen_context = _look_up(self.contexts, self.totals, keys >> 8)
        different = _look_up(self.contexts, self.followers, keys >> 8)
        total = seen_context + different
        return np.where(total > 0, (seen_gram + different * shorter) / np.maximum(total, 1), shorter)


def _look_up(sorted_keys: np.ndarray, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """`values` at `keys`, zero for a key that is not there."""
    at = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return np.where(sorted_keys[at] == keys, values[at], 0)
