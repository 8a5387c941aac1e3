"""What a card has, a multiprocessor (CUDA C++ Programming Guide, technical specifications), and so what fits on it."""

from __future__ import annotations

from dataclasses import dataclass

from dormouse_bench.moe.costs import Rates


@dataclass(frozen=True)
class Card:
    """One GPU. Every card here has 65,536 registers a multiprocessor and keeps 1 KiB of shared memory a block."""

    name: str
    arch: int
    """Compute capability × 10."""
    multiprocessors: int
    shared: int
    """Bytes of shared memory a multiprocessor."""
    warps: int
    blocks: int

    def resident(self, *, registers: int, shared: int, num_warps: int) -> int:
        """Blocks of a kernel that one multiprocessor holds at once: the least that any of its limits allows."""
        a_warp = -(-registers // 8) * 8 * 32  # registers are handed out by 256 a warp
        return min(self.blocks, self.warps // num_warps, self.shared // (shared + 1024), 65_536 // (a_warp * num_warps))


RTX_5060_TI = Card("GeForce RTX 5060 Ti", arch=120, multiprocessors=36, shared=102_400, warps=48, blocks=24)
RTX_5060_TI_RATES = Rates(bytes_per_second=448e9, flops_per_second=49e12)
"""The memory's own rate (28 Gbit/s on 128 bits) and what mma.sync could do: from its data sheet, not measured."""
H200 = Card("NVIDIA H200", arch=90, multiprocessors=132, shared=233_472, warps=64, blocks=32)
MEASURED = {H200.name: H200}
"""Cards whose results the predictor is held to, by the name that torch gives them."""
