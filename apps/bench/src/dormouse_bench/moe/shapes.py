"""The expert passes that are measured, by name.

Letters: T tokens, k choices a token, E experts, d model, r rank or inner width, f output width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Routing = Literal["uniform", "zipf", "trained"]


@dataclass(frozen=True)
class Shape:
    """Sizes of one expert pass, how its rows are spread, and what stands around it."""

    op: Literal["latent_glu_experts", "glu_experts"]
    tokens: int
    d: int
    r: int
    """Rank of the latents; the inner width I of SwiGLU experts."""
    f: int
    """Width of a row that leaves an expert; d for SwiGLU experts."""
    experts: int
    k: int
    routing: Routing = "uniform"
    shared_rank: int = 0
    """Not 0: a shared expert of that rank and the dense W_down [d, f] belong to the pass."""
    capacities: tuple[int, ...] = ()
    """Rows an expert that the padded arms allow; none: they pad to the largest count and drop nothing."""

    @property
    def rows(self) -> int:
        """Routed rows, R = T·k."""
        return self.tokens * self.k

    @property
    def f_pad(self) -> int:
        """Width of h as the latent pass holds it: f rounded up to 16."""
        return -(-self.f // 16) * 16


B1 = Shape(
    op="latent_glu_experts", tokens=16384, d=2048, r=64, f=5461, experts=1024, k=2, capacities=(32, 48, 64, 128)
)  # fmt: skip
QWEN3 = Shape(op="glu_experts", tokens=16384, d=2048, r=768, f=2048, experts=128, k=8)
TINY = Shape(op="latent_glu_experts", tokens=48, d=32, r=16, f=37, experts=6, k=2, capacities=(8, 48))

SHAPES: dict[str, Shape] = {
    "b1": B1,
    "b1-f5472": replace(B1, f=5472),
    "b1-zipf": replace(B1, routing="zipf"),
    "b1-trained": replace(B1, routing="trained"),
    "scope": replace(B1, shared_rank=192, capacities=(48, 64)),
    "qwen3": QWEN3,
    "olmoe": replace(QWEN3, r=1024, experts=64),
    "tiny": TINY,
    "tiny-zipf": replace(TINY, routing="zipf"),
    "tiny-scope": replace(TINY, shared_rank=16),
    "tiny-glu": Shape(op="glu_experts", tokens=48, d=32, r=16, f=32, experts=6, k=2),
}
"""What `--shape` knows. The tiny ones are for a CPU: they check the benchmark, not a machine."""
DEFAULTS = {
    "cuda": ("b1", "b1-f5472", "b1-zipf", "scope", "qwen3", "olmoe"),
    "cpu": ("tiny", "tiny-zipf", "tiny-scope", "tiny-glu"),
}
