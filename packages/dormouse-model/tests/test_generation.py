from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from dormouse_kernels import Counters
from dormouse_model import Dormouse, State, generate
from dormouse_model.generation import PREFILL, read
from dormouse_model.sampling import NonFiniteLogits

BOUND = 2e-5
"""Largest difference of a logit between the cache and the parallel forward, in fp32, for logits of order 1."""


def test_the_cache_gives_the_logits_of_the_parallel_forward(tiny):
    text = bytes(range(60, 127))
    with torch.no_grad():
        want = tiny(torch.tensor([list(text)])).logits[0]
    for prompt in (1, 16, 37):
        (logits,), state = read(tiny, [text[:prompt]])
        assert float((logits - want[prompt - 1]).abs().max()) < BOUND
        for t in range(prompt, len(text)):
            (logits,), state = read(tiny, [text[t : t + 1]], state)
            assert float((logits - want[t]).abs().max()) < BOUND


def test_greedy_text_is_what_the_parallel_forward_would_choose(tiny):
    text = b"".join(generate(tiny, b"ab", 30, temperature=0))
    with torch.no_grad():
        logits = tiny(torch.tensor([list(b"ab" + text)])).logits[0]
    assert list(text) == logits[1:-1].argmax(-1).tolist()


def test_a_prompt_read_in_pieces_is_the_prompt(tiny, monkeypatch):
    whole, _ = read(tiny, [bytes(100)])
    monkeypatch.setattr("dormouse_model.generation.PREFILL", 33)
    pieces, _ = read(tiny, [bytes(100)])
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


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        (b"x", {"temperature": -1.0}, "temperature must be 0 or more"),
        (b"x", {"top_k": 0}, "top_k must be 1 or more"),
        (b"x", {"top_p": 0.0}, "top_p must be above 0"),
        (b"x", {"max_new_bytes": -1}, "max_new_bytes must be 0 or more, got -1"),
        (b"x", {"stop": [b"a", b""]}, "stop holds an empty text"),
        (b"x", {"stop": b""}, "stop holds an empty text"),
        (b"x", {"seed": 2**64}, "seed must fit in 64 bits"),
        (b"x", {"seed": -(2**63) - 1}, "seed must fit in 64 bits"),
        ([b"x", b"y"], {"seed": 2**64 - 1}, "seed must fit in 64 bits, got .* for 2 prompts"),
        ([], {}, "prompt holds no text"),
    ],
)
def test_impossible_requests_are_refused_before_anything_is_read(prompt, options, says, tiny):
    with pytest.raises(ValueError, match=says):
        generate(tiny, prompt, **({"max_new_bytes": 3} | options))


def test_no_bytes_may_be_asked_for(tiny):
    assert list(generate(tiny, b"x", 0)) == list(generate(tiny, [b"x", b"y"], 0)) == []


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error_and_not_a_byte(tiny, temperature, wrong):
    with torch.no_grad():
        tiny.head.weight.fill_(wrong)
    stream = generate(tiny, b"x", 2, temperature=temperature)
    with pytest.raises(NonFiniteLogits, match="not finite; load an earlier checkpoint"):
        next(stream)


def test_generation_leaves_no_gradient_graph_and_keeps_grad_mode(tiny):
    next(iter(generate(tiny, b"x", 2)))
    assert torch.is_grad_enabled()
    logits, state = read(tiny, [b"x"])
    assert not logits.requires_grad
    assert not any(t.requires_grad for t in state.tensors())


PROMPTS = [b"the dormouse", b"x", b"", b"a summer day", bytes(range(70))]


def together(model: Dormouse, prompts: list[bytes], count: int, **options: Any) -> list[bytes]:
    return [b"".join(row) for row in zip(*generate(model, prompts, count, **options), strict=True)]


@pytest.mark.parametrize("mixer", ["kda", "sdpa"])
@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 5}, {"seed": 5, "top_k": 9, "top_p": 0.8}])
def test_a_batch_writes_what_each_prompt_writes_alone(options, mixer, tiny_config, enliven):
    model = enliven(Dormouse(tiny_config(mixer=mixer)))
    seeds = [{"seed": options["seed"] + row} if "seed" in options else {} for row in range(len(PROMPTS))]
    alone = [b"".join(generate(model, p, 12, **(options | seed))) for p, seed in zip(PROMPTS, seeds, strict=True)]
    assert together(model, PROMPTS, 12, **options) == alone


@pytest.mark.parametrize("mixer", ["kda", "sdpa"])
def test_logits_of_a_batch_are_those_of_each_row_alone(mixer, tiny_config, enliven):
    model, texts = enliven(Dormouse(tiny_config(mixer=mixer))), [b"abc", b"d", b"efg", b"hi" * 40]
    logits, state = read(model, texts)
    again, _ = read(model, [b"q", b"rs", b"t", b"u"], state)
    for row, text in enumerate(texts):
        (want,), past = read(model, [text])
        assert float((logits[row] - want).abs().max()) < BOUND
        (want,), _ = read(model, [[b"q", b"rs", b"t", b"u"][row]], past)
        assert float((again[row] - want).abs().max()) < BOUND


def test_prompts_of_one_length_are_read_together_and_the_others_apart(tiny):
    shapes = []
    tiny.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    list(generate(tiny, [b"abc", b"d", b"efg"], 3))
    assert shapes == [(2, 3), (1, 1), (3, 1), (3, 1)]


def test_text_ends_after_the_stop_that_it_writes(tiny):
    whole = b"".join(generate(tiny, b"ab", 30, seed=3))
    stop = whole[10:12]
    end = whole.index(stop) + 2
    assert end > 2
    assert b"".join(generate(tiny, b"ab", 30, seed=3, stop=stop)) == whole[:end]
    assert b"".join(generate(tiny, b"ab", 30, seed=3, stop=[b"not in it", stop])) == whole[:end]
    # A stop in the prompt, or half in it, ends nothing.
    assert b"".join(generate(tiny, b"ab", 5, seed=3, stop=[b"ab", b"b" + whole[:1]])) == whole[:5]


def test_a_row_that_has_ended_takes_no_more_time_and_changes_no_other(tiny):
    whole = together(tiny, [b"ab", b"cd", b"ef"], 20, seed=3)
    stop = whole[1][4:6]
    ends = [row.index(stop) + 2 if stop in row else 20 for row in whole]
    assert ends[1] < 20
    sizes = []
    tiny.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape[0]))
    assert together(tiny, [b"ab", b"cd", b"ef"], 20, seed=3, stop=stop) == [
        row[:end] for row, end in zip(whole, ends, strict=True)
    ]
    assert sum(sizes) == sum(ends)


def test_a_batch_ends_when_every_row_has(tiny):
    (first,) = generate(tiny, [b"a", b"b"], 1, temperature=0)
    assert list(generate(tiny, [b"a", b"b"], 9, temperature=0, stop=first)) == [first]


def test_a_saved_past_goes_on_exactly(tiny, tmp_path):
    text = b"the dormouse slept through the winter"
    whole = b"".join(generate(tiny, text, 20, temperature=0))
    _, state = read(tiny, [text[:-1]])
    state.save(tmp_path / "past.safetensors")
    loaded = State.load(tmp_path / "past.safetensors")
    (here,), _ = read(tiny, [text[-1:]], state)
    (there,), _ = read(tiny, [text[-1:]], loaded)
    assert torch.equal(here, there)
    assert b"".join(generate(tiny, text[-1:], 20, temperature=0, state=loaded)) == whole


def test_a_past_of_other_sequences_or_without_a_byte_to_read_is_refused(tiny):
    with pytest.raises(ValueError, match="state is of 2 sequences, prompt of 1; pass one prompt a sequence"):
        generate(tiny, b"x", 3, state=tiny.init_state(2))
    with pytest.raises(ValueError, match="a prompt is empty where a state is given"):
        generate(tiny, [b"x", b""], 3, state=tiny.init_state(2))
