"""The source whose entropy is known: nothing that predicts it goes below that, and what learns comes near."""

from __future__ import annotations

from pathlib import Path

import dormouse_train
import numpy as np
import pytest
from dormouse_train.baselines import witten_bell
from dormouse_train.config import DataSection
from dormouse_train.data import ByteView, open_corpus
from dormouse_train.data.markov import BITS, LETTERS, Markov
from dormouse_train.errors import UserError


def text(source: Markov) -> np.ndarray:
    return np.frombuffer(b"".join(source.chunks()), dtype=np.uint8)


def surprises(source: Markov) -> np.ndarray:
    """-log2 of the probability that the source itself gives to each of its letters, found from the letters."""
    letters = np.concatenate([np.zeros(source.order, np.int64), text(source) - np.int64(LETTERS[0])])
    n = source.nbytes
    contexts = sum(letters[back : back + n] << 3 * (source.order - 1 - back) for back in range(source.order))
    ranks = source.permutations.argsort(axis=1)[contexts, letters[source.order :]]
    return np.array(BITS)[ranks]


def test_the_entropy_is_that_of_the_ranks():
    assert sum(2.0**-bits for bits in BITS) == 1
    assert Markov(2, 0).entropy == 127 / 64


# The bounds are six deviations of a mean of independent draws: one seed in 500 million would miss them.
@pytest.mark.parametrize("order", [1, 2, 4])
def test_the_source_surprises_itself_by_its_entropy(order: int):
    source = Markov(order, seed=3, nbytes=200_000)
    found = surprises(source)
    assert abs(found.mean() - source.entropy) < 6 * source.spread(source.nbytes)
    assert found.std() == pytest.approx(source.spread(1), rel=0.05)


def test_every_context_has_a_permutation_of_its_own():
    permutations = Markov(3, seed=0).permutations
    assert permutations.shape == (512, 8)
    assert np.array_equal(np.sort(permutations, axis=1), np.broadcast_to(np.arange(8), (512, 8)))
    assert len(np.unique(permutations, axis=0)) > 490


def test_the_bytes_are_a_function_of_order_and_seed_and_a_shorter_source_begins_a_longer_one():
    long, short = text(Markov(2, 5, 300_000)), text(Markov(2, 5, 1001))
    assert np.array_equal(long[:1001], short)
    assert not np.array_equal(text(Markov(2, 6, 1001)), short)
    assert not np.array_equal(text(Markov(3, 5, 1001)), short)
    assert bytes(short[:16]) == b"hgaahfeehcgeacdd"


@pytest.mark.parametrize("name", ["markov:", "markov:2", "markov:2:x", "markov:0:1", "markov:7:1", "markov:2:1:4:5"])
def test_a_wrong_name_is_refused_with_the_form(name: str):
    with pytest.raises(UserError, match=r"write markov:ORDER:SEED|the order is 1 to 6"):
        Markov.parse(name)


def test_a_run_reads_it_by_name_and_knows_its_entropy(tmp_path: Path):
    data = open_corpus(DataSection(paths=("markov:2:5:5000",)), tmp_path)
    whole = [*data.train.read(0, len(data.train)), *data.heldout.read(0, len(data.heldout))]
    assert bytes(whole) == bytes(text(Markov(2, 5, 5000)))
    assert (len(data.heldout), data.entropy) == (250, 127 / 64)
    again = open_corpus(DataSection(paths=("markov:2:5:5000",)), tmp_path)
    assert again.manifest() == data.manifest()


def test_an_ngram_model_comes_near_the_entropy_from_above_once_it_sees_the_order():
    source = Markov(2, seed=1, nbytes=1_100_000)
    letters = text(source)
    held = 100_000
    bits = witten_bell(letters[:-held], ByteView([letters[-held:]]), max_context=4)
    bound = source.entropy - 6 * source.spread(held)
    assert all(each > bound for each in bits)
    assert bits[0] > bits[1] > source.entropy + 0.2
    assert abs(bits[2] - source.entropy) < 6 * source.spread(held) + 0.01


def test_a_short_run_of_nano_comes_near_the_entropy_and_not_below(tmp_path: Path):
    source = Markov(1, seed=0, nbytes=300_000)
    result = dormouse_train.train(
        "nano",
        run=tmp_path / "run",
        overrides={"data.paths": [source.name], "train.steps": 40, "train.batch": 8, "train.seq": 128},
        sets=["train.device=cpu", "eval.sample_bytes=0", "checkpoint.every=0"],
    )
    assert result.heldout_bpb is not None
    assert result.window_bytes == 15_000
    assert result.heldout_bpb > source.entropy - 6 * source.spread(15_000)
    # Against what the source itself says of the same bytes the noise is smaller: six deviations of the mean of the
    # difference are 0.01 where the two differ by 0.2 bits a byte. A byte that is seen before it is predicted costs 0.
    possible = surprises(source)[-15_000:].mean()
    assert possible - 0.01 < result.heldout_bpb < possible + 0.05
