"""Engram: which rows are read, equal on every device; what they may depend on; what a read trains."""

from __future__ import annotations

import hashlib

import pytest
import torch
from dormouse_model import Dormouse
from dormouse_model.config import ConfigError, EngramSection, validate
from dormouse_model.engram.ngrams import NONE, ngram_rows
from dormouse_model.engram.tables import read_rows
from torch import Tensor

TEXT = b"def dormouse(): return \xff\x00\x80"
GOLDEN = {
    (2, 4096, 0): [3582, 790, 2221, 986, 1821, 3271, 3252, 1125, 3077, 2310, 2098, 2794, 285, 3502, 3660, 91],
    (4, 4096, 0): [2734, 2093, 2421, 1430, 1377, 383, 1246, 3730, 708, 2391, 571, 3993, 3111, 112, 2491, 1395],
    (4, 6_214_000, 7): [
        *(181955, 1605095, 2236111, 571751, 1108270, 1783784, 6166887, 4542315),
        *(2994560, 1618887, 3237183, 2462391, 2415230, 3423749, 2916600, 848158),
    ],
}
"""(order, rows, seed): rows of the n-grams that end at the last sixteen bytes of TEXT."""


def reference(text: bytes, order: int, rows: int, seed: int) -> list[int]:
    """The rows by Python's unbounded integers, taken modulo 2^64 where int64 wraps."""
    found = []
    salt = int.from_bytes(hashlib.sha256(f"engram:{seed}:{order}".encode()).digest()[:8], "little")
    for t in range(len(text)):
        gram = text[t + 1 - order : t + 1] if t + 1 >= order else None
        if gram is None:
            found.append(NONE)
            continue
        key = int.from_bytes(gram, "big")
        if 256**order > rows:
            key ^= salt
            for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
                key = ((key ^ (key >> shift)) * multiplier) % 2**64
            key = key % 2**63 % rows
        found.append(key)
    return found


def of(text: bytes, order: int, rows: int, seed: int = 0) -> list[int]:
    ids = torch.tensor([list(text)], dtype=torch.uint8)
    return ngram_rows(ids, torch.full((1, 7), NONE), order, rows, seed)[0].tolist()


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("rows", [2, 300, 65_521, 65_536, 2**24, 6_214_000])
@pytest.mark.parametrize("order", range(1, 9))
def test_rows_are_those_of_python_s_own_integers(order, rows, seed):
    text = bytes(torch.randint(0, 256, (400,), generator=torch.Generator().manual_seed(order)).tolist())
    assert of(text, order, rows, seed) == reference(text, order, rows, seed)


@pytest.mark.parametrize(("order", "rows", "seed"), list(GOLDEN))
def test_sixteen_rows_are_what_they_always_were(order, rows, seed):
    """A checkpoint's tables mean nothing under another hash."""
    assert of(TEXT, order, rows, seed)[10:26] == GOLDEN[order, rows, seed]


def test_an_order_with_a_row_for_every_n_gram_has_exactly_its_own():
    assert of(b"ab\xc8\xc8", 1, 256) == [97, 98, 200, 200]
    # A uint8 product would wrap: 200 * 256 + 200.
    assert of(b"ab\xc8\xc8", 2, 65_536) == [NONE, 97 * 256 + 98, 98 * 256 + 200, 51_400]
    assert of(b"\x00\x00\x01", 3, 2**24) == [NONE, NONE, 1]


def test_hashed_rows_are_in_the_table_and_spread_like_chance():
    text = torch.randint(0, 256, (1, 300_007), generator=torch.Generator().manual_seed(0))
    rows = ngram_rows(text, torch.full((1, 7), NONE), 8, 65_521, 0)[0, 7:]
    assert int(rows.min()) >= 0
    assert int(rows.max()) < 65_521
    taken = len(rows.unique())
    empty = 65_521 * (1 - 1 / 65_521) ** len(rows)
    assert abs(65_521 - taken - empty) < 3 * empty**0.5


@pytest.mark.parametrize("order", [2, 4, 8])
def test_every_byte_of_an_n_gram_decides_its_row_and_no_other(order):
    source = torch.Generator().manual_seed(order)
    grams = torch.randint(0, 256, (2000, order + 1), generator=source)
    none = torch.full((2000, 7), NONE)
    rows = ngram_rows(grams, none, order, 65_521, 0)[:, -1]
    for place in range(order + 1):
        edited = grams.clone()
        edited[:, place] ^= torch.randint(1, 256, (2000,), generator=source)
        moved = float((ngram_rows(edited, none, order, 65_521, 0)[:, -1] != rows).float().mean())
        assert moved == 0.0 if place == 0 else moved > 0.99, place


def test_two_seeds_and_two_orders_hash_apart():
    text = bytes(range(256))
    assert sum(a == b for a, b in zip(of(text, 3, 4096, 0), of(text, 3, 4096, 1), strict=True)) < 10
    assert sum(a == b for a, b in zip(of(bytes(256), 3, 4096), of(bytes(256), 4, 4096), strict=True)) == 2


def test_bytes_before_are_as_if_they_had_been_part_of_the_text(bytes_of):
    text, none = bytes_of(3, 40), torch.full((3, 3), NONE)
    for order in (1, 2, 4):
        whole = ngram_rows(text, none, order, 300, 0)
        for cut in (1, 2, 3, 20):
            before = torch.cat([none, text[:, :cut]], 1)[:, -3:]
            assert torch.equal(ngram_rows(text[:, cut:], before, order, 300, 0), whole[:, cut:])
    # The row of a sequence's start does not depend on the sequence above it in the batch.
    assert torch.equal(whole[1:2], ngram_rows(text[1:2], none[1:2], 4, 300, 0))


def test_a_read_trains_the_rows_it_read_and_a_place_without_an_n_gram_trains_none():
    table = torch.arange(12.0).view(6, 2).requires_grad_()
    index = torch.tensor([[3, NONE, 3], [NONE, 0, 5]])
    read = read_rows(table, index, sparse_grad=True)
    assert read.tolist() == [[[6, 7], [0, 0], [6, 7]], [[0, 0], [0, 1], [10, 11]]]
    (read * torch.arange(1.0, 7.0).view(2, 3, 1)).sum().backward()
    gradient = table.grad
    assert gradient is not None
    assert gradient.is_sparse
    assert gradient.coalesce().indices().tolist() == [[0, 3, 5]]
    assert gradient.to_dense()[:, 0].tolist() == [5, 0, 0, 1 + 3, 0, 6]


def test_reading_nothing_leaves_an_empty_gradient():
    table = torch.ones(6, 2, requires_grad=True)
    read_rows(table, torch.full((2, 3), NONE), sparse_grad=True).sum().backward()
    assert table.grad is not None
    assert table.grad.coalesce().indices().shape == (1, 0)


def test_a_dense_gradient_holds_the_same_sums(tiny, bytes_of):
    gradients = []
    for sparse in (True, False):
        tiny.zero_grad()
        tiny.block.memory.engram.sparse_grad = sparse
        tiny(bytes_of(2, 30)).logits.square().mean().backward()
        gradients.append(tiny.block.memory.engram.tables.grad)
    assert [gradient.is_sparse for gradient in gradients] == [True, False]
    assert torch.equal(gradients[0].coalesce().to_dense(), gradients[1])


def test_a_model_as_it_is_made_trains_in_a_plain_loop_of_torchs(tiny, bytes_of):
    optimizer = torch.optim.SGD(tiny.parameters(), lr=0.1)
    before = tiny.block.memory.engram.tables.detach().clone()
    tiny(bytes_of(2, 30)).logits.square().mean().backward()
    assert bool(torch.nn.utils.clip_grad_norm_(tiny.parameters(), 1.0) > 0)
    optimizer.step()
    assert bool((tiny.block.memory.engram.tables != before).any())


def test_a_row_is_trained_by_the_bytes_that_have_its_n_gram_and_by_no_other(tiny):
    """`abc`: the table of bytes is read three times, of pairs twice, of fours never."""
    tiny.block.memory.engram.sparse_grad = True
    tiny(torch.tensor([list(b"abc")])).logits.square().sum().backward()
    gradient = tiny.block.memory.engram.tables.grad.coalesce()
    pairs = [256 + row for row in of(b"abc", 2, 300)[1:]]
    assert gradient.indices()[0].tolist() == sorted([97, 98, 99, *pairs])
    assert bool((gradient.values() != 0).any(-1).all())


def test_a_zero_convolution_leaves_the_first_forward_as_if_there_were_none(tiny_config, bytes_of):
    model = Dormouse(tiny_config())
    engram = model.block.memory.engram
    assert engram is not None
    assert not bool(engram.conv.weight.any())
    with torch.no_grad():
        engram.tables.normal_(generator=torch.Generator().manual_seed(0))
        u, (recall, _) = torch.randn(2, 9, 24), engram.recall(bytes_of(2, 9))
        output, _ = engram(u, recall, None)
        affinity = (engram.query_norm(u) * recall.key).sum(-1, keepdim=True) / 24**0.5
        torch.testing.assert_close(output, affinity.sigmoid() * recall.value)


def test_rows_of_zeros_are_where_a_model_starts_and_say_nothing(tiny_config, bytes_of):
    """Engram then adds exactly 0: what is left of the branch is the share of the dense path."""
    model, without = Dormouse(tiny_config(), seed=3), Dormouse(tiny_config(enabled=False), seed=3)
    assert torch.equal(model(bytes_of(2, 20)).logits, without(bytes_of(2, 20)).logits)


def test_no_key_or_value_reads_a_later_byte(tiny, bytes_of):
    """By value: an edited byte changes what the tables say of it and of as many bytes as an n-gram is long."""
    ids = bytes_of(1, 30)
    edited = ids.clone()
    edited[0, 12] ^= 0x55
    with torch.no_grad():
        one, two = (tiny.block.memory.engram.recall(text)[0] for text in (ids, edited))
    for name, a, b in zip(one._fields, one, two, strict=True):
        changed = (a != b).any(-1)[0]
        assert changed.nonzero().flatten().tolist() == [12, 13, 14, 15], name


def test_no_output_of_engram_has_a_gradient_of_a_later_position(tiny, bytes_of):
    engram = tiny.block.memory.engram
    recall, _ = engram.recall(bytes_of(1, 17))
    sources: tuple[Tensor, ...] = (torch.randn(1, 17, 24, requires_grad=True), *(t.detach() for t in recall))
    sources = tuple(t.requires_grad_() for t in sources)
    output, _ = engram(sources[0], type(recall)(*sources[1:]), None)
    for t in range(17):
        gradients = torch.autograd.grad(output[:, t].sum(), sources, retain_graph=True)
        for name, gradient in zip(("u", "key", "value"), gradients, strict=True):
            assert not bool(gradient[:, t + 1 :].any()), name
            assert bool(gradient[:, t].any()), name


def test_orders_that_cannot_be_are_refused_with_the_bounds():
    for orders in ([], [0], [9], [3, 2], [2, 2]):
        with pytest.raises(ConfigError, match=r"orders must rise from at least 1 to at most 8"):
            validate(EngramSection, {"orders": orders})
