"""The bytes of a run as two views, one to train on and one held out, mapped from disk and never in memory whole."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from dormouse_train.config import DataSection
from dormouse_train.data import manifest as manifests
from dormouse_train.data import packing
from dormouse_train.data.manifest import Entry, Manifest
from dormouse_train.data.markov import Markov
from dormouse_train.data.sources import find, standard_library
from dormouse_train.errors import UserError
from dormouse_train.run_folder import CONFIG

FOLDER = "data"


class ByteView:
    """Bytes of several mapped pieces, one after the other; `len(view)`, `view.read(start, n)`.

    `documents`: ascending positions at which a document begins, `[n]` int64, mapped as well; by default the whole view
    is one document.
    """

    def __init__(self, pieces: Sequence[np.ndarray], documents: np.ndarray | None = None) -> None:
        self._pieces = [piece for piece in pieces if len(piece)]
        self._ends = list(accumulate(len(piece) for piece in self._pieces))
        self.documents = np.zeros(min(1, len(self)), dtype=np.int64) if documents is None else documents

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, n: int) -> np.ndarray:
        """A copy of bytes `start`..`start + n - 1`: `[n]` uint8. `IndexError` where the view has no such bytes."""
        if start < 0 or n < 0 or start + n > len(self):
            raise IndexError(f"read: bytes {start} to {start + n} of a view of {len(self)}")
        out = np.empty(n, dtype=np.uint8)
        filled = 0
        for part in self._slices(start, n):
            out[filled : filled + len(part)] = part
            filled += len(part)
        return out

    def documents_in(self, start: int, n: int) -> np.ndarray:
        """Which of bytes `start`..`start + n - 1` begin a document, counted from `start`: ascending int64."""
        first, last = np.searchsorted(self.documents, (start, start + n))
        return self.documents[first:last] - start

    def parts(self, spans: Iterable[tuple[int, int]]) -> ByteView:
        """The bytes of each (start, n) one after the other, still mapped and not copied."""
        return ByteView([part for start, n in spans for part in self._slices(start, n)])

    def _slices(self, start: int, n: int) -> Iterator[np.ndarray]:
        at = bisect_right(self._ends, start)
        while n > 0:
            piece = self._pieces[at]
            skip = start - (self._ends[at] - len(piece))
            part = piece[skip : skip + n]
            yield part
            start, n, at = start + len(part), n - len(part), at + 1


@dataclass(frozen=True)
class Corpus:
    """`train` and `heldout` bytes of a run, the `test` bytes of a split that has them, and the manifest of all."""

    train: ByteView
    heldout: ByteView
    test: ByteView
    files: Manifest

    @property
    def name(self) -> str:
        """What the bytes are called, such as `standard library of Python 3.11.7`."""
        return self.files.name

    @property
    def entropy(self) -> float | None:
        """Bits a byte that no model can be below in the mean, where a synthetic source is all there is."""
        sources = [entry.source for entry in self.files.files]
        return sources[0].entropy if len(sources) == 1 and isinstance(sources[0], Markov) else None

    def manifest(self) -> dict[str, Any]:
        """What `data.json` holds."""
        return self.files.as_dict()


def open_corpus(data: DataSection, run: Path) -> Corpus:
    """The corpus of `run`: found, split and described in `run/data.json` the first time, checked against it afterwards.

    All but large raw files are packed into `run/data/`, streamed, and not needed again while that copy is whole; those
    are mapped where they lie. Every file, and of files with rows every row, is a document. A side that begins within a
    document begins one there.
    Errors: `UserError` naming a file that is missing, empty, damaged, or has changed since the run began, and for a run
    that has lost its `data.json`: other bytes in the place of those it is of would not be noticed.
    """
    if (run / manifests.NAME).exists():
        described = manifests.load(run)
        return Corpus(*_open(described, run / FOLDER, begun=True), described)
    if (run / CONFIG).exists():
        raise UserError(f"data: {run / manifests.NAME} is missing since the run began; put it back, or start a new run")
    if data.paths:
        name, sources = ", ".join(data.paths), find(data.paths, data.text_field)
    else:
        name, sources = manifests.library_name(), standard_library()
    heldout = find(data.val, data.text_field)
    described = manifests.describe(sources, name, data.heldout_fraction, heldout)
    views = _open(described, run / FOLDER)
    manifests.save(described, run)
    return Corpus(*views, described)


def open_paths(paths: Sequence[str], folder: Path, text_field: str = "text") -> ByteView:
    """All bytes of files, folders, globs and synthetic sources as one view; all but large raw files go to `folder`."""
    entries = manifests.measured(find(paths, text_field))
    if not entries:
        raise UserError(f"data: {', '.join(paths)} holds no bytes; give files with something in them")
    return _open(Manifest(", ".join(paths), tuple(entries)), folder)[1]


def _open(described: Manifest, folder: Path, *, begun: bool = False) -> tuple[ByteView, ByteView, ByteView]:
    """All sides; of a run that has `begun` every byte is compared with the manifest, in its packs where it can be."""
    entries = described.files
    packed = any(map(packing.is_packed, entries))
    whole = packed and packing.is_whole(entries, folder)
    if begun:
        manifests.check([entry for entry in entries if not (whole and packing.is_packed(entry))])
    if packed and not whole:
        packing.pack(entries, folder)
    starts = packing.documents(entries, folder)
    pieces = [_pieces(entries, packing.mapped(folder / f"{side}.bin"), side) for side in packing.SIDES]
    test = [packing.mapped(Path(entry.path))[-entry.test_bytes :] for entry in entries if entry.test_bytes]
    return ByteView(pieces[0], starts[0]), ByteView(pieces[1], starts[1]), ByteView(test)


def _pieces(entries: Sequence[Entry], pack: np.ndarray, side: str) -> list[np.ndarray]:
    """The bytes of one side in reading order; neighbours within the pack become one piece."""
    pieces: list[np.ndarray] = []
    begin = end = 0
    for entry in entries:
        first, length = (0, entry.train_bytes) if side == "train" else (entry.train_bytes, entry.heldout_bytes)
        if packing.is_packed(entry):
            end += length
        elif length:
            pieces += [pack[begin:end], packing.mapped(Path(entry.path))[first : first + length]]
            begin = end
    return [*pieces, pack[begin:end]]
