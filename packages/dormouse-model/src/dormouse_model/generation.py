"""Writing bytes: the prompts are read in large pieces, then one byte a step with the recurrent state as the cache.

Letters: `B` sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import torch
from torch import Tensor

from dormouse_model.model import Dormouse
from dormouse_model.sampling import Sampling
from dormouse_model.state import State

EMPTY_PROMPT = b"\n"
PREFILL = 4096
"""Bytes of all prompts read at once: bounds memory whatever their length."""


@overload
def generate(
    model: Dormouse,
    prompt: bytes,
    max_new_bytes: int,
    *,
    temperature: float = ...,
    top_k: int | None = ...,
    top_p: float = ...,
    stop: bytes | Sequence[bytes] = ...,
    seed: int = ...,
    state: State | None = ...,
) -> Iterator[bytes]: ...


@overload
def generate(
    model: Dormouse,
    prompt: Sequence[bytes],
    max_new_bytes: int,
    *,
    temperature: float = ...,
    top_k: int | None = ...,
    top_p: float = ...,
    stop: bytes | Sequence[bytes] = ...,
    seed: int = ...,
    state: State | None = ...,
) -> Iterator[list[bytes]]: ...


def generate(
    model: Dormouse,
    prompt: bytes | Sequence[bytes],
    max_new_bytes: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    stop: bytes | Sequence[bytes] = (),
    seed: int = 0,
    state: State | None = None,
) -> Iterator[bytes] | Iterator[list[bytes]]:
    """Yield up to `max_new_bytes` single bytes that continue `prompt`, each as soon as it is drawn.

    Of several prompts, of any lengths, a step yields a list: a byte of each, `b""` for one that has ended. Row i is
    written as if alone with the seed `seed + i`, up to rounding (and up to `experts.capacity`, which the rows share).
    A byte is drawn by `Sampling` with a CPU generator. Text ends after `stop`, or the first of several, which is
    written. An empty prompt starts from a newline. With `state` the prompt goes on from that past, of one sequence a
    prompt. The cost of a byte does not depend on how many came before.
    Errors: `ValueError` for what `Sampling` refuses, a negative number of bytes, no prompt, an empty stop, a seed that
    leaves -2**63 .. 2**64-1, a state of another batch, or an empty prompt after one; `NonFiniteLogits`, when a byte is
    asked for, where there is none to draw.
    """
    alone = isinstance(prompt, bytes)
    prompts = [prompt] if isinstance(prompt, bytes) else list(prompt)
    stops = (stop,) if isinstance(stop, bytes) else tuple(stop)
    sampling = Sampling(temperature, top_k, top_p)
    _check(prompts, max_new_bytes, stops, seed, state)
    steps = _stream(model, [text or EMPTY_PROMPT for text in prompts], max_new_bytes, sampling, stops, seed, state)
    return (step[0] for step in steps) if alone else steps


def _check(prompts: list[bytes], max_new_bytes: int, stops: tuple[bytes, ...], seed: int, state: State | None) -> None:
    if max_new_bytes < 0:
        raise ValueError(f"generate: max_new_bytes must be 0 or more, got {max_new_bytes}")
    if not prompts:
        raise ValueError('generate: prompt holds no text to go on from; pass at least one, b"" for a new one')
    if not all(stops):
        raise ValueError("generate: stop holds an empty text, which is everywhere; pass at least one byte")
    if not -(2**63) <= seed <= 2**64 - len(prompts):
        raise ValueError(f"generate: seed must fit in 64 bits, got {seed} for {len(prompts)} prompts; choose another")
    if state is None:
        return
    if state.batch_size != len(prompts):
        raise ValueError(
            f"generate: state is of {state.batch_size} sequences, prompt of {len(prompts)}; pass one prompt a sequence"
        )
    if not all(prompts):
        raise ValueError("generate: a prompt is empty where a state is given; pass the byte that follows the state's")


def _stream(
    model: Dormouse,
    prompts: list[bytes],
    max_new_bytes: int,
    sampling: Sampling,
    stops: tuple[bytes, ...],
    seed: int,
    state: State | None,
) -> Iterator[list[bytes]]:
    sources = [torch.Generator().manual_seed(seed + row) for row in range(len(prompts))]
    longest = max(map(len, stops), default=1)
    ends = [b""] * len(prompts)
    going, unread = list(range(len(prompts))), prompts
    for _ in range(max_new_bytes):
        logits, state = read(model, unread, state)
        unread = [bytes([sampling.draw(one, sources[row])]) for row, one in zip(going, logits.cpu(), strict=True)]
        drawn = dict(zip(going, unread, strict=True))
        yield [drawn.get(row, b"") for row in range(len(prompts))]
        for row, byte in drawn.items():
            ends[row] = (ends[row] + byte)[-longest:]
        kept = [i for i, row in enumerate(going) if not ends[row].endswith(stops)]
        if not kept:
            return
        if len(kept) < len(going):  # what has ended takes no more time
            state, going, unread = state.select(kept), [going[i] for i in kept], [unread[i] for i in kept]


@torch.no_grad()
def read(model: Dormouse, texts: Sequence[bytes], state: State | None = None) -> tuple[Tensor, State]:
    """Read at least one byte of each sequence: (logits [B, 256] of the byte after each, the state to go on from).

    Texts of one length are read together, texts of different lengths apart: none is padded.
    """
    lengths: dict[int, list[int]] = {}
    for row, text in enumerate(texts):
        lengths.setdefault(len(text), []).append(row)
    if len(lengths) == 1:
        return _read_together(model, texts, state)
    parts = [
        _read_together(model, [texts[row] for row in rows], None if state is None else state.select(rows))
        for rows in lengths.values()
    ]
    back = torch.tensor([row for rows in lengths.values() for row in rows]).argsort().tolist()
    return torch.cat([logits for logits, _ in parts])[back], State.cat([after for _, after in parts]).select(back)


def _read_together(model: Dormouse, texts: Sequence[bytes], state: State | None) -> tuple[Tensor, State]:
    ids = torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8).view(len(texts), -1)
    logits = None
    for piece in ids.to(model.embedding.weight.device).split(max(1, PREFILL // len(texts)), 1):
        with model.autocast():
            output = model(piece, state, return_state=True)
        logits, state = output.logits[:, -1], output.state
    assert logits is not None
    assert state is not None
    return logits, state


__all__ = ["generate", "read"]
