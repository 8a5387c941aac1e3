from __future__ import annotations

import itertools

import pytest
import torch
from dormouse_kernels import Counters
from dormouse_model import generate
from dormouse_model.generation import PREFILL, NonFiniteLogits, draw, read

BOUND = 2e-5
"""Largest difference of a logit between the cache and the parallel forward, in fp32, for logits of order 1."""


def test_the_cache_gives_the_logits_of_the_parallel_forward(tiny):
    text = bytes(range(60, 127))
    with torch.no_grad():
        want = tiny(torch.tensor([list(text)])).logits[0]
    for prompt in (1, 16, 37):
        logits, state = read(tiny, text[:prompt])
        assert float((logits - want[prompt - 1]).abs().max()) < BOUND
        for t in range(prompt, len(text)):
            logits, state = read(tiny, text[t : t + 1], state)
            assert float((logits - want[t]).abs().max()) < BOUND


def test_greedy_text_is_what_the_parallel_forward_would_choose(tiny):
    text = b"".join(generate(tiny, b"ab", 30, temperature=0))
    with torch.no_grad():
        logits = tiny(torch.tensor([list(b"ab" + text)])).logits[0]
    assert list(text) == logits[1:-1].argmax(-1).tolist()


def test_a_prompt_read_in_pieces_is_the_prompt(tiny, monkeypatch):
    whole, _ = read(tiny, bytes(100))
    monkeypatch.setattr("dormouse_model.generation.PREFILL", 33)
    pieces, _ = read(tiny, bytes(100))
    assert PREFILL > 100
    assert float((whole - pieces).abs().max()) < BOUND


def test_after_the_prompt_each_byte_is_one_decode_step(tiny):
    with Counters() as counters:
        assert len(list(generate(tiny, b"abc", 5))) == 5
    snapshot = counters.snapshot()
    assert (snapshot["kda/forward/bounded"], snapshot["kda/decode/recurrent"]) == (2, 2 * 4)


def test_bytes_come_as_they_are_drawn(tiny):
    calls = []
    tiny.register_forward_hook(lambda *_: calls.append(1))
    stream = generate(tiny, b"x", 1000)
    first = list(itertools.islice(stream, 3))
    assert all(isinstance(byte, bytes) and len(byte) == 1 for byte in first)
    assert len(calls) == 3


def test_the_same_seed_writes_the_same_and_another_seed_another(tiny):
    def write(seed: int) -> bytes:
        return b"".join(generate(tiny, b"x", 20, seed=seed))

    one = write(1)
    torch.manual_seed(0)
    assert write(1) == one != write(2)


def test_an_empty_prompt_starts_from_a_newline(tiny):
    read_first: list[list[int]] = []
    tiny.register_forward_pre_hook(lambda _, inputs: read_first.append(inputs[0].flatten().tolist()))
    next(iter(generate(tiny, b"", 10)))
    assert read_first == [[10]]


def test_temperature_shapes_the_draw():
    logits = torch.zeros(256)
    logits[65], logits[66] = 5.0, 4.0
    source = torch.Generator().manual_seed(0)
    assert draw(logits, 0, source) == 65
    assert {draw(logits, 0.01, source) for _ in range(50)} == {65}
    ones = sum(draw(logits, 1.0, source) == 65 for _ in range(2000)) / 2000
    assert abs(ones - float(logits.softmax(-1)[65])) < 0.04
    assert len({draw(logits, 1e6, source) for _ in range(200)}) > 80


def test_a_tiny_temperature_does_not_overflow():
    logits = torch.linspace(-80, 80, 256)
    assert draw(logits, 1e-30, torch.Generator().manual_seed(0)) == 255


def test_impossible_requests_are_refused_before_anything_is_read(tiny):
    for temperature in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="temperature must be 0 or more"):
            generate(tiny, b"x", 3, temperature=temperature)
    with pytest.raises(ValueError, match="max_new_bytes must be 0 or more, got -1"):
        generate(tiny, b"x", -1)
    assert list(generate(tiny, b"x", 0)) == []


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error_and_not_a_byte(tiny, temperature, wrong):
    with torch.no_grad():
        tiny.head.weight.fill_(wrong)
    stream = generate(tiny, b"x", 2, temperature=temperature)
    with pytest.raises(NonFiniteLogits, match="not finite; load an earlier checkpoint"):
        next(stream)


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_a_seed_of_more_than_64_bits_is_refused(tiny, seed):
    with pytest.raises(ValueError, match="seed must fit in 64 bits"):
        generate(tiny, b"x", 3, seed=seed)


def test_generation_leaves_no_gradient_graph_and_keeps_grad_mode(tiny):
    next(iter(generate(tiny, b"x", 2)))
    assert torch.is_grad_enabled()
    logits, state = read(tiny, b"x")
    assert not logits.requires_grad
    assert not any(t.requires_grad for t in state.tensors())
