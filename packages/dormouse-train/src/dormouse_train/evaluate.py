"""Held-out bits per byte, over a window whose size is always given with it.

Letters: `S` streams read side by side, `T` bytes of a segment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dormouse_model import Dormouse

    from dormouse_train.data import ByteView

STREAMS = 16
STREAM_BYTES = 1024
"""Shortest stream worth cutting a window into: each begins with no past."""
SEGMENT = 512
BEFORE = ord("\n")
"""What stands before the first byte of a stream, as before an empty prompt."""


@dataclass(frozen=True)
class Evaluation:
    """Mean bits a byte over `window_bytes` held-out bytes."""

    bpb: float
    window_bytes: int


@dataclass(frozen=True)
class Window:
    """Which bytes are scored: pieces `[starts[i], starts[i] + lengths[i])`, none overlapping, longest first."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes scored."""
        return sum(self.lengths)

    def over(self, view: ByteView) -> ByteView:
        """The scored bytes of `view`, piece after piece, without a copy."""
        return view.parts(zip(self.starts, self.lengths, strict=True))


def window(available: int, wanted: int) -> Window:
    """`min(wanted, available)` bytes in up to 16 evenly spaced pieces of equal length, give or take one; 0 wants all.

    Errors: `ValueError` when nothing is available.
    """
    size = min(wanted, available) if wanted else available
    if size < 1:
        raise ValueError(f"window: {available} bytes are held out; give longer data")
    pieces = min(STREAMS, max(1, size // STREAM_BYTES))
    lengths = [size // pieces + (i < size % pieces) for i in range(pieces)]
    gaps = available - size
    starts = [sum(lengths[:i]) + gaps * i // max(1, pieces - 1) for i in range(pieces)]
    return Window(tuple(starts), tuple(lengths))


def evaluate(
    model: Dormouse,
    view: ByteView,
    wanted: int,
    *,
    device: torch.device | None = None,
    segment: int = SEGMENT,
    check: Callable[[], None] | None = None,
    advance: Callable[[int], None] | None = None,
) -> Evaluation:
    """Score `model` on `window(len(view), wanted)`: every byte once, given all bytes of its piece before it.

    The pieces are streams of one batch, read `segment` bytes at a time with the recurrent state handed on, so that no
    context is cut at a segment's border. The first byte of a piece is predicted from a newline. Sums are fp64.
    `check` is called before every segment, and what it raises ends the evaluation; `advance` after it, with the number
    of bytes that it scored.
    """
    device = device or next(model.parameters()).device
    chosen = window(len(view), wanted)
    was_training = model.training
    model.eval()
    nats = 0.0
    try:
        for part, scored in _segments(model, view, chosen, device, segment, check):
            nats += part
            if advance is not None:
                advance(scored)
    finally:
        model.train(was_training)
    return Evaluation(nats / chosen.nbytes / math.log(2), chosen.nbytes)


@torch.no_grad()
def _segments(
    model: Dormouse,
    view: ByteView,
    chosen: Window,
    device: torch.device,
    segment: int,
    check: Callable[[], None] | None,
) -> Iterator[tuple[float, int]]:
    """Of every segment of `chosen` the sum of the losses, in nats, and the number of bytes."""
    longest = chosen.lengths[0]
    lengths = torch.tensor(chosen.lengths, device=device)
    state = None
    for at in range(0, longest, segment):
        if check is not None:
            check()
        ids = torch.from_numpy(_rows(view, chosen, at, min(segment, longest - at))).to(device)
        with model.autocast():
            out = model(ids[:, :-1], state, return_state=True)
        state = out.state
        losses = F.cross_entropy(out.logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
        # A piece one byte shorter than the longest is padded: that byte is not scored.
        scored = torch.arange(at, at + ids.shape[1] - 1, device=device) < lengths[:, None]
        yield float(losses.double()[scored.flatten()].sum()), int(scored.sum())


def _rows(view: ByteView, chosen: Window, at: int, n: int) -> np.ndarray:
    """Bytes `at - 1` to `at + n - 1` of every piece, int64 `[S, n + 1]`, a newline before the first."""
    rows = np.full((len(chosen.starts), n + 1), BEFORE, dtype=np.int64)
    skip = int(at == 0)
    first = at - 1 + skip
    for row, start, length in zip(rows, chosen.starts, chosen.lengths, strict=True):
        there = min(at + n, length) - first
        row[skip : skip + there] = view.read(start + first, there)
    return rows
