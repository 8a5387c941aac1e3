"""Times several arms of one comparison fairly: interleaved, by the median, with the noise of the same arm twice."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Work = Callable[[], object]


@dataclass(frozen=True)
class Race:
    """Median milliseconds of every arm, and how far two runs of the first arm were apart."""

    ms: dict[str, float]
    noise: float
    """|a - a'| / a of the first arm's two medians: a ratio of arms nearer to 1 than this says nothing."""

    def ratio(self, slow: str, fast: str) -> float:
        """How many times longer `slow` took than `fast`."""
        return self.ms[slow] / self.ms[fast]


def once(work: Work, device: str) -> float:
    """Milliseconds of one call. On CUDA between two events, with nothing else waiting on the stream."""
    if device == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)
    begun = time.perf_counter()
    work()
    return (time.perf_counter() - begun) * 1e3


def race(arms: Mapping[str, Work], device: str, rounds: int) -> Race:
    """Runs the arms in turn, `rounds` times after one warm-up, so that a slow moment of the machine falls on all.

    The first arm runs twice in every round, first and last: the distance of its two medians is the noise floor.
    """
    if rounds < 1:
        raise ValueError(f"race: rounds is {rounds}; run at least one")
    first = next(iter(arms))
    runs = [*arms, first]
    for name in arms:
        arms[name]()
    taken = [[once(arms[name], device) for name in runs] for _ in range(rounds)]
    medians = [statistics.median(column) for column in zip(*taken, strict=True)]
    return Race(ms=dict(zip(arms, medians, strict=False)), noise=abs(medians[-1] - medians[0]) / medians[0])


def peak_extra_bytes(work: Work, device: str, gradient_bytes: int = 0) -> int | None:
    """Most bytes that one call holds beyond those before it and its gradients; None on a CPU, which does not count."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return max(0, torch.cuda.max_memory_allocated() - before - gradient_bytes)


def median_ms(work: Work, device: str, budget_ms: int) -> float:
    """Median milliseconds of one call within a budget; on CUDA by `do_bench`, the L2 emptied before every call."""
    if device == "cuda":
        from triton.testing import do_bench

        return float(do_bench(work, warmup=max(1, budget_ms // 4), rep=budget_ms, return_mode="median"))
    work()
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < budget_ms:
        taken.append(once(work, device))
    return statistics.median(taken)


def host_syncs(work: Work, device: str) -> int | None:
    """How often one call waits for the device, as torch's sync debug mode sees it; None on a CPU."""
    if device != "cuda":
        return None
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("synchronizing CUDA operation" in str(each.message) for each in seen)
