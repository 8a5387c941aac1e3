"""Baselines: against their own definition computed one byte at a time, and against what they must not do."""

from __future__ import annotations

import lzma
import math
from collections import Counter, defaultdict
from time import process_time
from typing import Any

import numpy as np
import pytest
from dormouse_train import baselines
from dormouse_train.data import ByteView
from dormouse_train.signals import StopRequested


def text(seed: int, n: int, symbols: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).integers(97, 97 + symbols, n).astype(np.uint8)


def witten_bell(train: np.ndarray, held: np.ndarray, max_context: int = 6, **options: Any) -> list[float]:
    return baselines.witten_bell(train, ByteView([held]), max_context, **options)


def slow_witten_bell(train: bytes, held: bytes, max_context: int, *, followers_of=len) -> list[float]:
    """The docstring's formula, byte by byte. `followers_of` is N(h) from the set of followers."""
    counts = Counter(train[i : i + n] for n in range(1, max_context + 2) for i in range(len(train) - n + 1))
    followers: dict[bytes, set[int]] = defaultdict(set)
    totals: Counter[bytes] = Counter()
    for gram, count in counts.items():
        followers[gram[:-1]].add(gram[-1])
        totals[gram[:-1]] += count
    bits = []
    for longest in range(max_context + 1):
        total = 0.0
        for t in range(len(held)):
            p = 1 / 256
            for k in range(min(longest, t) + 1):
                context = held[t - k : t]
                different = followers_of(followers.get(context, set()))
                if totals[context]:
                    p = (counts[held[t - k : t + 1]] + different * p) / (totals[context] + different)
            total -= math.log2(p)
        bits.append(total / len(held))
    return bits


def test_ngram_counts_give_the_definition_to_rounding() -> None:
    # The held-out text has bytes and contexts that were never trained on.
    train, held = text(0, 400), np.concatenate([text(1, 150), text(2, 20, symbols=9)])
    assert witten_bell(train, held) == pytest.approx(slow_witten_bell(train.tobytes(), held.tobytes(), 6), rel=1e-12)


def test_the_definition_notices_a_wrong_number_of_followers() -> None:
    train, held = text(0, 400), text(1, 150)
    planted = slow_witten_bell(train.tobytes(), held.tobytes(), 3, followers_of=lambda seen: 1 if seen else 0)
    assert witten_bell(train, held, 3) != pytest.approx(planted, rel=1e-4)


@pytest.mark.parametrize("size", [1, 2, 6, 7])
def test_a_text_shorter_than_the_longest_context_is_scored_with_what_there_is(size: int) -> None:
    train, held = text(3, size), text(4, 9)
    assert witten_bell(train, held) == pytest.approx(slow_witten_bell(train.tobytes(), held.tobytes(), 6))
    assert witten_bell(held, train) == pytest.approx(slow_witten_bell(held.tobytes(), train.tobytes(), 6))


def test_bytes_above_127_keep_their_place_in_a_seven_byte_key() -> None:
    high = np.random.default_rng(5).integers(250, 256, 300).astype(np.uint8)
    assert witten_bell(high, high[:80]) == pytest.approx(slow_witten_bell(high.tobytes(), high[:80].tobytes(), 6))


def test_context_of_a_random_source_does_not_go_below_its_entropy() -> None:
    bits = witten_bell(text(6, 200_000, 4), text(7, 20_000, 4))
    assert bits[0] == pytest.approx(2.0, abs=0.01)
    assert min(bits) > 1.99


def test_a_periodic_text_costs_almost_nothing_once_the_context_decides() -> None:
    period = np.tile(np.frombuffer(b"abac", np.uint8), 5000)
    bits = witten_bell(period, period[:4000])
    assert bits[0] == pytest.approx(1.5, abs=0.01)
    assert bits[3] < 0.01


@pytest.mark.parametrize(("train", "held"), [(b"", b"a"), (b"a", b"")])
def test_an_empty_side_is_refused(train: bytes, held: bytes) -> None:
    with pytest.raises(ValueError, match="need at least one byte"):
        witten_bell(np.frombuffer(train, np.uint8), np.frombuffer(held, np.uint8))


def test_a_context_that_does_not_fit_a_key_is_refused() -> None:
    with pytest.raises(ValueError, match="max_context is 7"):
        witten_bell(text(0, 50), text(1, 50), 7)


def test_xz_counts_what_the_held_out_bytes_add() -> None:
    train = text(8, 60_000)
    repeated, new = train[:4000], text(9, 4000, symbols=200)
    view = ByteView([train])
    assert baselines.measure(view, ByteView([repeated])).xz < 0.2
    assert baselines.measure(view, ByteView([new])).xz > 7.0


def test_xz_sees_a_repeat_from_farther_back_than_its_own_default_window() -> None:
    noise = np.random.default_rng(10).integers(0, 256, 9 * 2**20).astype(np.uint8)
    data = noise.tobytes() + noise[: 2**18].tobytes()
    blocks = (np.frombuffer(data[i : i + 2**20], np.uint8) for i in range(0, len(data), 2**20))
    default = len(lzma.compress(data, preset=1))
    assert len(data) - baselines.xz_bytes(blocks, len(data)) > 2**18 - 2**14
    assert default > len(data) - 2**14  # the planted variant: a window that does not span the data


def test_a_huge_corpus_is_fitted_on_even_pieces_and_says_so() -> None:
    view = ByteView([np.arange(3_000_000, dtype=np.uint32).view(np.uint8)])
    kept = baselines.take(view, 2 * 2**20)
    assert len(kept) == 2 * 2**20
    assert kept[: 2**20].tobytes() == view.read(0, 2**20).tobytes()
    assert kept[2**20 :].tobytes() == view.read(len(view) - 2**20, 2**20).tobytes()
    measured = baselines.measure(view, ByteView([kept[:1000]]), limit=2**20)
    assert (measured.fitted_bytes, measured.train_bytes, measured.window_bytes) == (2**20, 12_000_000, 1000)


def test_a_corpus_within_the_limit_is_taken_whole() -> None:
    view = ByteView([text(11, 5000)])
    assert baselines.take(view, 5000).tobytes() == view.read(0, 5000).tobytes()


@pytest.mark.parametrize("block", [1, 7, 64])
def test_scoring_in_blocks_changes_no_score(block: int) -> None:
    train, held = text(12, 3000), text(13, 150)
    assert witten_bell(train, held, block=block) == pytest.approx(witten_bell(train, held), rel=1e-12)


def test_xz_of_blocks_is_xz_of_the_whole() -> None:
    whole = text(14, 300_000, 30)
    blocks = [whole[i : i + 1000] for i in range(0, len(whole), 1000)]
    assert baselines.xz_bytes(blocks, len(whole)) == baselines.xz_bytes([whole], len(whole))


def test_a_measurement_that_is_given_up_ends_soon() -> None:
    def stop() -> None:
        raise StopRequested

    noise = np.random.default_rng(15).integers(0, 256, 2 * 2**20).astype(np.uint8)
    begin = process_time()
    with pytest.raises(StopRequested):
        baselines.measure(ByteView([noise]), ByteView([noise[:1000]]), check=stop)
    given_up = process_time() - begin
    begin = process_time()
    baselines.measure(ByteView([noise]), ByteView([noise[:1000]]))
    assert given_up < (process_time() - begin) / 2
