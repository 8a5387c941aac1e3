"""What becomes of each candidate: compiled apart, then timed; a failure of either is a row and not the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from dormouse_kernels.aot import Build, Compiled, CompileError, compile_each, shared_limit
from dormouse_kernels.moe.passes import Tiles

MULTIPROCESSORS: dict[int, tuple[int, int, int]] = {
    80: (167_936, 64, 32), 86: (102_400, 48, 16), 89: (102_400, 48, 24), 90: (233_472, 64, 32),
    100: (233_472, 64, 32), 120: (102_400, 48, 24),
}  # fmt: skip
"""Shared memory, warps and blocks that a multiprocessor holds (CUDA C programming guide, technical specifications)."""
AGREE = 2e-2
"""Relative L2 between two tiles' results: two roundings to bf16 a product and one a sum lie within it."""


@dataclass(frozen=True)
class Candidate:
    """One choice of tiles, and what was learned of it."""

    name: str
    tiles: Tiles
    kernels: tuple[tuple[Compiled, int], ...] = field(default=(), repr=False)
    """Its launches as compiled, each with its warps."""
    failure: str = ""
    ms: float | None = None
    """Forward and backward; None where nothing was measured."""

    @property
    def shared(self) -> int:
        """Bytes of shared memory of its largest launch."""
        return max((compiled.shared for compiled, _ in self.kernels), default=0)

    @property
    def registers(self) -> int:
        """A thread's, of its largest launch."""
        return max((compiled.registers for compiled, _ in self.kernels), default=0)

    @property
    def spills(self) -> int:
        """Bytes of stack a thread, of all launches together."""
        return sum(compiled.spills for compiled, _ in self.kernels)

    @property
    def occupancy(self) -> float:
        """Warps that a multiprocessor holds at once, as a share of what it could: the mean of its launches."""
        shares = [occupancy(compiled, warps) for compiled, warps in self.kernels]
        return sum(shares) / len(shares) if shares else 0.0

    @property
    def rank(self) -> tuple[bool, float, int, float, int]:
        """Sorts candidates, best first: what ran by its time, what was only compiled by spills, occupancy, memory."""
        ms = float("inf") if self.ms is None else self.ms
        return bool(self.failure), ms, self.spills, -self.occupancy, sum(c.shared for c, _ in self.kernels)


def occupancy(compiled: Compiled, num_warps: int) -> float:
    """The share of a multiprocessor's warps that blocks of a kernel can fill at once."""
    shared, warps, blocks = MULTIPROCESSORS[compiled.arch]
    a_warp = -(-compiled.registers // 8) * 8 * 32  # registers are handed out by 256 a warp
    by_memory = shared // (compiled.shared + 1024)  # a block costs 1 KiB more than it asks for
    held = min(blocks, warps // num_warps, by_memory, 65_536 // (a_warp * num_warps))
    return held * num_warps / warps


def compile_all(tiles: Mapping[str, Tiles], builds_of: Callable[[Tiles], Sequence[Build]]) -> list[Candidate]:
    """Every candidate compiled beside this process, so that a compiler that crashes takes nothing with it.

    A launch that several candidates share is compiled once.
    """
    launched: dict[str, Sequence[Build]] = {}
    unlaunchable: dict[str, str] = {}
    for name, each in tiles.items():
        try:
            launched[name] = builds_of(each)
        except Exception as error:  # of any kind: it is what the op's own launches raise
            unlaunchable[name] = _first_line(error)
    distinct = {_key(build): build for builds in launched.values() for build in builds}
    results = dict(zip(distinct, compile_each(list(distinct.values())), strict=True))
    made = []
    for name, each in tiles.items():
        if name in unlaunchable:
            made.append(Candidate(name, each, failure=unlaunchable[name]))
            continue
        compiled = [(results[_key(build)], build.num_warps) for build in launched[name]]
        failures = [_first_line(result) for result, _ in compiled if isinstance(result, CompileError)]
        kernels = tuple((result, warps) for result, warps in compiled if isinstance(result, Compiled))
        made.append(_fitting(Candidate(name, each, kernels, failure=failures[0] if failures else "")))
    return made


def _fitting(candidate: Candidate) -> Candidate:
    limits = {shared_limit(compiled.arch) for compiled, _ in candidate.kernels}
    if candidate.failure or candidate.shared <= min(limits):
        return candidate
    return replace(candidate, failure=f"{candidate.shared} bytes of shared memory, of {min(limits)}")


def _key(build: Build) -> object:
    return build.kernel.fn.__qualname__, tuple(sorted(build.arguments.items())), build.num_warps, build.num_stages


def time_all(
    candidates: Sequence[Candidate],
    run: Callable[[Tiles], list[torch.Tensor]],
    bench: Callable[[Callable[[], object]], float],
) -> list[Candidate]:
    """Times those that compiled, in order; one whose results are not the first's is a failure, whatever its time."""
    wanted: list[torch.Tensor] | None = None
    first = ""
    timed = []
    for each in candidates:
        if each.failure:
            timed.append(each)
            continue
        try:
            got = run(each.tiles)
            if wanted is None:
                wanted, first = got, each.name
            apart = max(_apart(ours, theirs) for ours, theirs in zip(got, wanted, strict=True))
            if not apart <= AGREE:
                timed.append(replace(each, failure=f"results differ by {apart:.1e} from those of {first}"))
                continue
            timed.append(replace(each, ms=bench(lambda tiles=each.tiles: run(tiles))))
        except Exception as error:  # a launch fails as RuntimeError, OutOfResources and more: each is a row
            timed.append(replace(each, failure=_first_line(error)))
    return timed


def _apart(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-30))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:160]
