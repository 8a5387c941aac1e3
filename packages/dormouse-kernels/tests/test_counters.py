"""Counters: who counts, under which key, and what survives a snapshot."""

import threading

import pytest
import torch
from dormouse_kernels import Counters
from dormouse_kernels.counters import current


def test_counts_are_by_site_phase_and_implementation():
    counters = Counters()
    counters.count("moe", "padded")
    counters.count("moe", "padded", n=2)
    counters.count("moe", "padded", phase="decode")
    counters.count("kda", "chunk")
    assert counters.snapshot() == {"kda/forward/chunk": 1, "moe/decode/padded": 1, "moe/forward/padded": 3}


def test_a_call_with_a_reason_is_a_fallback():
    counters = Counters()
    counters.count("kda", "torch")
    assert counters.fallbacks() == 0
    counters.count("kda", "torch", reason="no cuda", n=2)
    counters.count("moe", "padded", phase="recompute", reason="rank 96")
    assert counters.fallbacks() == 3
    assert counters.snapshot() == {
        "kda/forward/fallback:no cuda": 2,
        "kda/forward/torch": 3,
        "moe/recompute/fallback:rank 96": 1,
        "moe/recompute/padded": 1,
    }


def test_only_the_innermost_is_current_and_leaving_restores():
    assert current() is None
    with Counters() as outer:
        assert current() is outer
        with Counters() as inner:
            assert current() is inner
        assert current() is outer
    assert current() is None


def test_an_error_inside_still_restores():
    with pytest.raises(KeyError), Counters():
        raise KeyError
    assert current() is None


def test_counters_entered_again_go_on_and_may_nest_in_themselves():
    counters = Counters()
    with counters, counters:
        counters.count("a", "b")
    with counters:
        counters.count("a", "b")
    assert current() is None
    assert counters.snapshot() == {"a/forward/b": 2}


def test_what_is_counted_inside_a_phase_belongs_to_it():
    with Counters() as counters:
        with counters.phase("recompute"):
            counters.count("a", "b")
            counters.count("a", "b", phase="decode")
            with counters.phase("forward"):
                counters.count("a", "b")
        counters.count("a", "b")
    assert counters.snapshot() == {"a/decode/b": 1, "a/forward/b": 2, "a/recompute/b": 1}


def test_the_phase_of_one_does_not_reach_another():
    first, second = Counters(), Counters()
    with first.phase("recompute"):
        second.count("a", "b")
    assert second.snapshot() == {"a/forward/b": 1}


def test_entering_a_phase_makes_its_counters_the_current_ones():
    first, second = Counters(), Counters()
    with first:
        with second.phase("recompute"):
            assert current() is second
        assert current() is first


def test_a_thread_sees_them_only_through_a_phase():
    seen = []
    with Counters() as counters:

        def recompute():
            seen.append(current())
            with counters.phase("recompute"):
                seen.append(current())

        thread = threading.Thread(target=recompute)
        thread.start()
        thread.join()
    assert seen == [None, counters]


@pytest.mark.parametrize(
    "enter", [lambda c: c.count("a", "b", phase="backward"), lambda c: c.phase("backward").__enter__()]
)
def test_an_unknown_phase_is_refused_with_the_list(enter):
    with pytest.raises(ValueError, match="phase is 'backward'; pass one of forward, recompute, decode"):
        enter(Counters())


class Watched(torch.Tensor):
    """A tensor that knows how often a number was read out of it."""

    reads = 0

    def __int__(self):
        Watched.reads += 1
        return super().__int__()


def test_row_counts_on_a_device_are_read_by_the_snapshot_only():
    counters = Counters()
    for _ in range(3):
        counters.count_rows("moe", "dropped", torch.tensor(2).as_subclass(Watched))
    assert Watched.reads == 0
    assert counters.snapshot() == {"moe/forward/dropped": 6}
    assert Watched.reads == 1


def test_row_counts_add_up_and_zeros_are_left_out():
    counters = Counters()
    counters.count_rows("moe", "dropped", torch.tensor(3))
    counters.count_rows("moe", "dropped", 4)
    counters.count_rows("moe", "dropped", torch.tensor(5), phase="recompute")
    counters.count_rows("moe", "bad_index", torch.tensor(0))
    assert counters.snapshot() == {"moe/forward/dropped": 7, "moe/recompute/dropped": 5}


def test_a_tensor_given_to_count_rows_is_not_changed_by_later_counts():
    counters, dropped = Counters(), torch.tensor(3)
    counters.count_rows("moe", "dropped", dropped)
    counters.count_rows("moe", "dropped", 1)
    assert dropped.item() == 3


def test_a_loaded_snapshot_replaces_and_goes_on():
    counters = Counters()
    counters.count("a", "b", reason="slow")
    counters.count_rows("a", "dropped", torch.tensor(2))
    snapshot = counters.snapshot()
    other = Counters()
    other.count("gone", "x")
    other.load(snapshot)
    assert other.snapshot() == snapshot
    other.count("a", "b", reason="slow")
    other.count_rows("a", "dropped", torch.tensor(1))
    assert other.snapshot() == {"a/forward/b": 2, "a/forward/dropped": 3, "a/forward/fallback:slow": 2}
    assert other.fallbacks() == 2
