from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from dormouse_train.config import load_config
from dormouse_train.data import Batches, ByteView, Streams, open_batches
from dormouse_train.data.batches import permuted
from dormouse_train.errors import UserError
from hypothesis import given, settings
from hypothesis import strategies as st


class Vast(ByteView):
    """A view too long to be in memory, whose bytes are zero."""

    def __init__(self) -> None:
        super().__init__([])

    def __len__(self) -> int:
        return 10**13

    def read(self, start: int, n: int) -> np.ndarray:
        assert 0 <= start <= len(self) - n
        return np.zeros(n, dtype=np.uint8)


def numbered(n: int) -> ByteView:
    return ByteView([np.random.default_rng(n).integers(0, 256, n, dtype=np.uint8)])


@given(n=st.integers(1, 700), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_the_order_of_an_epoch_is_a_permutation(n: int, seed: int, epoch: int):
    image = permuted(np.arange(n, dtype=np.uint64), n, seed, np.full(n, epoch, dtype=np.uint64))
    assert sorted(image.tolist()) == list(range(n))


def test_the_order_depends_on_seed_and_epoch_and_leaves_no_run_in_place():
    index, epoch = np.arange(500, dtype=np.uint64), np.zeros(500, dtype=np.uint64)
    orders = [permuted(index, 500, seed, epoch + np.uint64(e)).tolist() for seed in range(3) for e in range(3)]
    assert len({tuple(order) for order in orders}) == 9
    for order in orders:
        steps = np.diff(order)
        assert np.mean(steps == 1) < 0.05
        assert abs(np.corrcoef(np.arange(500), order)[0, 1]) < 0.2


def test_an_epoch_reads_every_window_once_at_one_offset():
    batches = Batches(numbered(1003), batch=3, seq=10, seed=1)
    assert batches.windows % 3 == 0
    starts = [start for step in range(batches.windows // 3) for start in batches.starts(step)]
    assert len({start % 10 for start in starts}) == 1
    assert len({start // 10 for start in starts}) == batches.windows == len(starts)


def test_over_epochs_every_byte_meets_every_position():
    batches = Batches(numbered(1003), batch=99, seq=10, seed=1)
    assert {start % 10 for step in range(100) for start in batches.starts(step)} == set(range(10))


@pytest.mark.parametrize("length", [11, 12, 19, 20, 21, 35, 1003])
def test_no_row_reaches_past_the_end(length: int):
    view = numbered(length)
    for step in range(200):
        assert Batches(view, batch=2, seq=10, seed=step).at(step).shape == (2, 11)


def test_a_row_is_the_bytes_of_the_view_from_its_start():
    view = numbered(5000)
    batches = Batches(view, batch=4, seq=16, seed=3)
    rows = batches.at(7)
    assert rows.dtype == np.uint8
    for row, start in zip(rows, batches.starts(7), strict=True):
        assert np.array_equal(row, view.read(start, 17))


def test_a_batch_is_a_function_of_the_step_and_not_of_what_was_read_before():
    view = numbered(3000)
    walked = Batches(view, batch=4, seq=16, seed=3)
    sequence = [walked.at(step) for step in range(200)]  # over an epoch's border
    assert np.array_equal(Batches(view, batch=4, seq=16, seed=3).at(150), sequence[150])
    assert not np.array_equal(Batches(view, batch=4, seq=16, seed=4).at(150), sequence[150])


@pytest.mark.parametrize("step", [0, 5, 46])
def test_micro_batches_partition_the_big_batch(step: int):
    view = numbered(3000)
    small, big = Batches(view, batch=4, seq=16, seed=3), Batches(view, batch=12, seq=16, seed=3)
    assert np.array_equal(np.concatenate([small.at(step, micro, 3) for micro in range(3)]), big.at(step))


def test_ranks_partition_the_big_batch():
    view = numbered(3000)
    ranks = [Batches(view, batch=4, seq=16, seed=3, rank=rank, world_size=3) for rank in range(3)]
    micros = [ranks[rank].at(9, micro, 2) for rank in range(3) for micro in range(2)]
    assert np.array_equal(np.concatenate(micros), Batches(view, batch=24, seq=16, seed=3).at(9))


def test_memory_does_not_grow_with_the_data():
    tracemalloc.start()
    batches = Batches(Vast(), batch=16, seq=256, seed=0)
    starts = [start for step in range(10**9, 10**9 + 20) for start in batches.starts(step)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000
    assert max(starts) > 9 * 10**12
    assert len(set(starts)) == 320


def test_too_few_bytes_are_refused_with_how_many_are_needed():
    with pytest.raises(UserError, match=r"256 bytes .* train.seq = 256 needs 257; .* lower train.seq"):
        Batches(numbered(256), batch=1, seq=256, seed=0)
    Batches(numbered(257), batch=1, seq=256, seed=0).at(10)


def test_a_rank_or_micro_batch_out_of_range_is_refused():
    with pytest.raises(ValueError, match="rank: got 2"):
        Batches(numbered(100), batch=1, seq=4, seed=0, rank=2, world_size=2)
    with pytest.raises(ValueError, match="micro: got 2"):
        Batches(numbered(100), batch=1, seq=4, seed=0).at(0, 2, 2)


@pytest.mark.parametrize("length", [401, 407, 419, 1003])
def test_in_a_stream_a_row_goes_on_where_it_ended(length: int):
    streams = Streams(numbered(length), batch=3, seq=10, seed=4)
    turned = 0
    for step in range(250):
        begins = streams.begins(step + 1)
        for before, after, begin in zip(streams.starts(step), streams.starts(step + 1), begins, strict=True):
            if before + 10 != after:  # round to the beginning of the data
                turned += 1
                assert after < 10
                assert begin.tolist()[:1] == [0]
            else:
                assert 0 not in begin
    assert turned >= 3 * 250 // (length // 10)


def test_the_rows_of_a_stream_begin_evenly_spread_where_the_seed_says():
    starts = [Streams(numbered(1001), batch=4, seq=10, seed=seed).starts(0) for seed in range(8)]
    assert len({each[0] for each in starts}) > 4
    for each in starts:
        assert {(b - a) % 1000 for a, b in zip(each, each[1:] + each[:1], strict=True)} == {250}


def test_a_stream_reads_every_window_once_in_an_epoch():
    streams = Streams(numbered(1005), batch=4, seq=10, seed=2)
    windows = [start // 10 for step in range(25) for start in streams.starts(step)]
    assert sorted(windows) == list(range(100))
    assert streams.epoch(25) == 1.0


def test_over_turns_a_stream_shifts_its_windows_and_stays_in_the_data():
    view = numbered(1007)
    streams = Streams(view, batch=2, seq=10, seed=0)
    assert {start % 10 for step in range(1500) for start in streams.starts(step)} == set(range(7))
    assert all(streams.at(step).shape == (2, 11) for step in range(0, 1500, 7))


def test_a_stream_is_a_function_of_the_step():
    view = numbered(1001)
    walked = Streams(view, batch=4, seq=10, seed=3)
    sequence = [walked.at(step) for step in range(60)]
    assert np.array_equal(Streams(view, batch=4, seq=10, seed=3).at(41), sequence[41])


def test_micro_batches_and_ranks_partition_the_rows_of_a_stream():
    view, big = numbered(3000), Streams(numbered(3000), batch=12, seq=10, seed=3)
    ranks = [Streams(view, batch=2, seq=10, seed=3, rank=rank, world_size=3) for rank in range(3)]
    for step in (0, 7):
        micros = [ranks[rank].at(step, micro, 2) for rank in range(3) for micro in range(2)]
        assert np.array_equal(np.concatenate(micros), big.at(step))


def test_documents_begin_where_the_view_says():
    view = ByteView([np.zeros(101, dtype=np.uint8)], np.array([0, 3, 40, 41, 77]))
    for batches in (Streams(view, batch=2, seq=10, seed=1), Batches(view, batch=2, seq=10, seed=1)):
        for step in range(12):
            for start, begins in zip(batches.starts(step), batches.begins(step), strict=True):
                assert begins.tolist() == [n - start for n in (0, 3, 40, 41, 77) if start <= n < start + 10]


def test_more_rows_than_a_stream_has_windows_are_refused_before_the_first_step():
    sets = ["data.order=stream", "train.seq=64", "train.batch=3", "train.accumulate=2"]
    says = r"384 training bytes have 5 windows of train.seq = 64 .* reads 6 rows .* give at least 385 bytes"
    with pytest.raises(UserError, match=says):
        open_batches(load_config("nano", sets), numbered(384))
    assert isinstance(open_batches(load_config("nano", sets), numbered(385)), Streams)
    assert type(open_batches(load_config("nano"), numbered(3000))) is Batches
