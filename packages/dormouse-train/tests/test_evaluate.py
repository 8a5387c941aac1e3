"""Held-out scores: which bytes are scored, each once, with all of the context before them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from dormouse_model import Dormouse
from dormouse_train.config import load_config
from dormouse_train.data import ByteView
from dormouse_train.evaluate import evaluate, window
from dormouse_train.signals import StopRequested
from torch.nn import functional as F

TINY = str(Path(__file__).parent / "tiny.toml")


@pytest.fixture(scope="module")
def model() -> Dormouse:
    return Dormouse(load_config(TINY).architecture, seed=3)


def view(n: int, seed: int = 0) -> ByteView:
    return ByteView([np.random.default_rng(seed).integers(0, 256, n).astype(np.uint8)])


def content(data: ByteView) -> bytes:
    return data.read(0, len(data)).tobytes()


@pytest.mark.parametrize("available", [1, 2, 1023, 1024, 5000, 40_000, 40_001, 40_017])
@pytest.mark.parametrize("wanted", [0, 1, 700, 4096, 33_333, 10**9])
def test_a_window_has_the_bytes_that_were_wanted_in_pieces_that_do_not_overlap(available: int, wanted: int) -> None:
    chosen = window(available, wanted)
    assert chosen.nbytes == (min(wanted, available) if wanted else available)
    ends = [0, *(start + n for start, n in zip(chosen.starts, chosen.lengths, strict=True))]
    assert all(before <= start for before, start in zip(ends[:-1], chosen.starts, strict=True))
    assert ends[-1] <= available
    assert max(chosen.lengths) - min(chosen.lengths) <= 1
    assert len(chosen.lengths) <= 16
    assert list(chosen.lengths) == sorted(chosen.lengths, reverse=True)


def test_a_part_of_the_bytes_is_spread_from_the_first_to_the_last() -> None:
    chosen = window(1_000_000, 32_768)
    assert chosen.starts[0] == 0
    assert chosen.starts[-1] + chosen.lengths[-1] == 1_000_000
    assert len(chosen.starts) == 16


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="0 bytes are held out"):
        window(0, 10)


def test_the_window_reads_the_bytes_that_are_scored() -> None:
    data = view(5000)
    chosen = window(5000, 3000)
    pieces = [data.read(s, n) for s, n in zip(chosen.starts, chosen.lengths, strict=True)]
    assert content(chosen.over(data)) == b"".join(piece.tobytes() for piece in pieces)
    assert len(chosen.over(data)) == 3000


def test_the_score_is_the_mean_over_every_byte_given_all_bytes_of_its_piece(model: Dormouse) -> None:
    data = view(2051)  # two pieces, one a byte longer, neither a multiple of the segment
    chosen = window(2051, 0)
    assert chosen.lengths == (1026, 1025)
    nats = 0.0
    for start, n in zip(chosen.starts, chosen.lengths, strict=True):
        piece = torch.from_numpy(data.read(start, n).astype(np.int64))
        ids = torch.cat([torch.tensor([10]), piece[:-1]])
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        nats += float(F.cross_entropy(logits.double(), piece, reduction="sum"))
    scored = evaluate(model, data, 0, segment=64)
    assert scored.window_bytes == 2051
    assert scored.bpb == pytest.approx(nats / 2051 / math.log(2), abs=1e-6)


def test_the_size_of_a_segment_does_not_change_the_score_because_the_state_is_handed_on(model: Dormouse) -> None:
    data = view(700)
    scores = [evaluate(model, data, 0, segment=segment).bpb for segment in (700, 64, 33)]
    assert scores == pytest.approx([scores[0]] * 3, abs=1e-6)
    # The planted variant: each segment from nothing.
    cut = [evaluate(model, ByteView([data.read(i, 70)]), 0).bpb for i in range(0, 700, 70)]
    assert abs(sum(cut) / 10 - scores[0]) > 1e-4


def test_a_model_that_knows_nothing_scores_eight_bits() -> None:
    blind = Dormouse(load_config(TINY).architecture)
    torch.nn.init.zeros_(blind.head.weight)
    assert evaluate(blind, view(300), 0).bpb == pytest.approx(8.0, abs=1e-6)


def test_a_score_leaves_the_model_in_its_mode_and_without_gradients(model: Dormouse) -> None:
    model.train()
    evaluate(model, view(100), 50)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_an_evaluation_is_given_up_between_segments(model: Dormouse) -> None:
    asked = []

    def stop() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise StopRequested

    model.train()
    with pytest.raises(StopRequested):
        evaluate(model, view(700), 0, segment=32, check=stop)
    assert len(asked) == 3
    assert model.training


def test_the_bytes_of_an_evaluation_are_never_read_all_at_once(model: Dormouse) -> None:
    most = []

    class Noting(ByteView):
        def read(self, start: int, n: int) -> np.ndarray:
            most.append(n)
            return super().read(start, n)

    evaluate(model, Noting([view(4100).read(0, 4100)]), 0, segment=64)
    assert max(most) == 65
