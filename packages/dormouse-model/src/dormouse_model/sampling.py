"""Choosing the next byte from its logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


class NonFiniteLogits(ValueError):
    """The model's logits are infinite or NaN: there is no byte to draw."""


@dataclass(frozen=True)
class Sampling:
    """Draws from `softmax(logits / temperature)`, cut to its `top_k` most probable bytes and then to `top_p` of these.

    `temperature` 0 takes the most probable byte. `top_p` keeps the fewest bytes, most probable first, that together
    have at least that share; of equal bytes the lower one comes first. Errors: `ValueError` for a temperature that is
    negative or not finite, a `top_k` below 1, or a `top_p` that is not in (0, 1].
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise ValueError(
                f"generate: temperature must be 0 or more, got {self.temperature}; 0 takes the most probable byte"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"generate: top_k must be 1 or more, got {self.top_k}; leave it out to keep every byte")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"generate: top_p must be above 0 and at most 1, got {self.top_p}; 1 keeps every byte")

    def draw(self, logits: Tensor, source: torch.Generator) -> int:
        """A byte for `logits` [256], drawn with the CPU generator `source`. Errors: `NonFiniteLogits`."""
        # fp64 keeps a small temperature from overflowing before the softmax subtracts the maximum.
        logits = logits.double().cpu()
        if not logits.isfinite().all():
            raise NonFiniteLogits("generate: the model's logits are not finite; load an earlier checkpoint")
        if self.temperature == 0:
            return int(logits.argmax())
        probabilities = self._cut((logits / self.temperature).softmax(-1))
        return int(torch.multinomial(probabilities, 1, generator=source))

    def _cut(self, probabilities: Tensor) -> Tensor:
        """`probabilities` [256], zero at the bytes that are not drawn; the sum of the others is not 1."""
        if self.top_k is None and self.top_p == 1:
            return probabilities
        ordered, byte = probabilities.sort(descending=True, stable=True)
        if self.top_k is not None:
            ordered[self.top_k :] = 0
        before = ordered.cumsum(-1) - ordered
        # The first byte always stays: nothing is before it.
        ordered[before >= self.top_p * ordered.sum()] = 0
        return torch.zeros_like(probabilities).scatter(0, byte, ordered)


__all__ = ["NonFiniteLogits", "Sampling"]
