"""Which implementation ran, where and in which phase: a context manager that every op reports to."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Literal, Self, get_args

import torch

Phase = Literal["forward", "recompute", "decode"]
RowEvent = Literal["dropped", "bad_index"]
PHASES: tuple[str, ...] = get_args(Phase)

_active: ContextVar[tuple[Counters, Phase] | None] = ContextVar("dormouse_kernels.counters", default=None)


def current() -> Counters | None:
    """The innermost `Counters` entered in this context, or None."""
    active = _active.get()
    return None if active is None else active[0]


class Counters:
    """Counts site × phase × implementation while it is entered: `with Counters() as counters: ...`.

    Only the innermost one counts. It can be entered again later and goes on from where it was. Row counts may be
    device tensors: they are added up on their device and read by `snapshot`, so that counting never syncs.

    `snapshot` keys are `{site}/{phase}/{implementation}`; where a fast path was replaced, also
    `{site}/{phase}/fallback:{reason}`; and rows that gave nothing, `{site}/{phase}/dropped` (over capacity) and
    `{site}/{phase}/bad_index` (indices outside the experts).
    """

    def __init__(self) -> None:
        self._calls: dict[str, int] = {}
        self._rows: dict[str, int | torch.Tensor] = {}
        self._tokens: list[Token[tuple[Counters, Phase] | None]] = []

    def __enter__(self) -> Self:
        self._tokens.append(_active.set((self, "forward")))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _active.reset(self._tokens.pop())

    @contextmanager
    def phase(self, phase: Phase) -> Generator[Self]:
        """What is counted inside belongs to `phase`, and is counted here.

        It makes this the current `Counters` too: autograd recomputes on threads that inherit no context, so a
        checkpoint enters `counters.phase("recompute")` around its second run.
        """
        _check_phase(phase)
        token = _active.set((self, phase))
        try:
            yield self
        finally:
            _active.reset(token)

    def count(self, site: str, implementation: str, phase: Phase | None = None, reason: str = "", n: int = 1) -> None:
        """Adds `n` calls of `implementation` at `site`; a `reason` says it stood in for a faster one (a fallback).

        `phase=None` means the phase that is entered, "forward" if none is.
        """
        prefix = f"{site}/{self._phase(phase)}"
        self._calls[f"{prefix}/{implementation}"] = self._calls.get(f"{prefix}/{implementation}", 0) + n
        if reason:
            key = f"{prefix}/fallback:{reason}"
            self._calls[key] = self._calls.get(key, 0) + n

    def count_rows(self, site: str, event: RowEvent, n: int | torch.Tensor, phase: Phase | None = None) -> None:
        """Adds `n` rows (an int, or an integer scalar tensor that is not read before `snapshot`) that gave nothing."""
        key = f"{site}/{self._phase(phase)}/{event}"
        self._rows[key] = self._rows[key] + n if key in self._rows else n

    def fallbacks(self) -> int:
        """How many calls were fallbacks."""
        return sum(n for key, n in self._calls.items() if "/fallback:" in key)

    def snapshot(self) -> dict[str, int]:
        """All counts by key, sorted; reads device counts, so it syncs. Zero row counts are left out."""
        rows = {key: int(n) for key, n in self._rows.items()}
        return dict(sorted((self._calls | {key: n for key, n in rows.items() if n}).items()))

    def load(self, snapshot: Mapping[str, int]) -> None:
        """Replaces every count by those of a `snapshot`."""
        self._rows = {key: n for key, n in snapshot.items() if key.endswith(("/dropped", "/bad_index"))}
        self._calls = {key: n for key, n in snapshot.items() if key not in self._rows}

    def _phase(self, phase: Phase | None) -> Phase:
        if phase is not None:
            _check_phase(phase)
            return phase
        active = _active.get()
        return active[1] if active is not None and active[0] is self else "forward"


def _check_phase(phase: str) -> None:
    if phase not in PHASES:
        raise ValueError(f"Counters: phase is {phase!r}; pass one of {', '.join(PHASES)}")
