"""Writing bytes: prefill in chunks, then one byte a step with the recurrent state as the cache."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from dormouse_model.model import Dormouse
from dormouse_model.state import State

EMPTY_PROMPT = b"\n"
PREFILL = 4096
"""Bytes of the prompt read at once: bounds memory whatever the prompt's length."""


class NonFiniteLogits(ValueError):
    """The model's logits are infinite or NaN: there is no byte to draw."""


def generate(
    model: Dormouse, prompt: bytes, max_new_bytes: int, *, temperature: float = 1.0, seed: int = 0
) -> Iterator[bytes]:
    """Yield `max_new_bytes` single bytes that continue `prompt`, each as soon as it is drawn.

    Drawn from `softmax(logits / temperature)` with a CPU generator of `seed`; temperature 0 takes the most probable
    byte. An empty prompt starts from a newline. The cost of a byte does not depend on how many came before.
    Errors: `ValueError` for a negative or non-finite temperature, a negative number of bytes, or a seed outside
    -2**63 .. 2**64-1; `NonFiniteLogits`, when a byte is asked for, where there is none to draw.
    """
    if not math.isfinite(temperature) or temperature < 0:
        raise ValueError(f"generate: temperature must be 0 or more, got {temperature}; 0 takes the most probable byte")
    if max_new_bytes < 0:
        raise ValueError(f"generate: max_new_bytes must be 0 or more, got {max_new_bytes}")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"generate: seed must fit in 64 bits, got {seed}")
    return _stream(model, prompt or EMPTY_PROMPT, max_new_bytes, temperature, seed)


def _stream(model: Dormouse, prompt: bytes, max_new_bytes: int, temperature: float, seed: int) -> Iterator[bytes]:
    source = torch.Generator().manual_seed(seed)
    state: State | None = None
    unread = prompt
    for _ in range(max_new_bytes):
        logits, state = read(model, unread, state)
        byte = draw(logits, temperature, source)
        unread = bytes([byte])
        yield unread


@torch.no_grad()
def read(model: Dormouse, text: bytes, state: State | None = None) -> tuple[Tensor, State]:
    """Read at least one byte: (logits [256] of the byte after `text`, the state to go on from)."""
    device = model.embedding.weight.device
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    logits = None
    for piece in ids.split(PREFILL):
        with model.autocast():
            output = model(piece.unsqueeze(0), state, return_state=True)
        logits, state = output.logits[0, -1], output.state
    assert logits is not None
    assert state is not None
    return logits, state


def draw(logits: Tensor, temperature: float, source: torch.Generator) -> int:
    """A byte from `softmax(logits / temperature)`, `logits` [256]; the largest logit's where temperature is 0."""
    # fp64 keeps a small temperature from overflowing before the softmax subtracts the maximum.
    logits = logits.double().cpu()
    if not logits.isfinite().all():
        raise NonFiniteLogits("generate: the model's logits are not finite; load an earlier checkpoint")
    if temperature == 0:
        return int(logits.argmax())
    probabilities = (logits / temperature).softmax(-1)
    return int(torch.multinomial(probabilities, 1, generator=source))
