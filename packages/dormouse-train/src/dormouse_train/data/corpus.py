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
from dormouse_train.data.manifest import Entry, Manifest
from dormouse_train.data.sources import find, standard_library
from dormouse_train.errors import UserError
from dormouse_train.run_folder import CONFIG, replacing

FOLDER = "data"
SIDES = ("train", "heldout")

PACK_BELOW = 16 << 20
"""Raw files from this many bytes on are mapped where they lie; smaller ones and `.gz` are packed, as maps are few."""


class ByteView:
    """Bytes of several mapped pieces, one after the other; `len(view)`, `view.read(start, n)`."""

    def __init__(self, pieces: Sequence[np.ndarray]) -> None:
        self._pieces = [piece for piece in pieces if len(piece)]
        self._ends = list(accumulate(len(piece) for piece in self._pieces))

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
    """`train` and `heldout` bytes of a run, and the manifest they were opened from."""

    train: ByteView
    heldout: ByteView
    files: Manifest

    @property
    def name(self) -> str:
        """What the bytes are called, such as `standard library of Python 3.11.7`."""
        return self.files.name

    def manifest(self) -> dict[str, Any]:
        """What `data.json` holds."""
        return self.files.as_dict()


def open_corpus(data: DataSection, run: Path) -> Corpus:
    """The corpus of `run`: found, split and described in `run/data.json` the first time, checked against it afterwards.

    Small files and `.gz` are packed into `run/data/`, streamed, and not needed again while that copy is whole; large
    raw files are mapped where they lie.
    Errors: `UserError` naming a file that is missing, empty, damaged, or has changed since the run began, and for a run
    that has lost its `data.json`: other bytes in the place of those it is of would not be noticed.
    """
    if (run / manifests.NAME).exists():
        described = manifests.load(run)
        return Corpus(*_open(described, run / FOLDER, begun=True), described)
    if (run / CONFIG).exists():
        raise UserError(f"data: {run / manifests.NAME} is missing since the run began; put it back, or start a new run")
    if data.paths:
        name, sources = ", ".join(data.paths), find(data.paths)
    else:
        name, sources = manifests.library_name(), standard_library()
    described = manifests.describe(sources, name, data.heldout_fraction)
    views = _open(described, run / FOLDER)
    manifests.save(described, run)
    return Corpus(*views, described)


def open_paths(paths: Sequence[str], folder: Path) -> ByteView:
    """All bytes of files, folders and globs as one view; small files and `.gz` are packed into `folder`."""
    measured = [(source, *manifests.measure(source.chunks())) for source in find(paths)]
    entries = tuple(Entry(str(source.path), size, digest, train_bytes=0) for source, size, digest in measured)
    view = _open(Manifest(", ".join(paths), entries), folder)[1]
    if not len(view):
        raise UserError(f"data: {', '.join(paths)} holds no bytes; give files with something in them")
    return view


def _open(described: Manifest, folder: Path, *, begun: bool = False) -> tuple[ByteView, ByteView]:
    """Both sides; of a run that has `begun` every byte is compared with the manifest, in its packs where it can be."""
    packed = [entry for entry in described.files if _is_packed(entry)]
    files = [folder / f"{side}.bin" for side in SIDES]
    whole = bool(packed) and _is_whole(packed, files)
    if begun:
        manifests.check([entry for entry in described.files if not (whole and _is_packed(entry))])
    if packed and not whole:
        _pack(packed, files)
    packs = [_map(path) for path in files]
    return _view(described, packs[0], 0), _view(described, packs[1], 1)


def _is_whole(packed: Sequence[Entry], files: Sequence[Path]) -> bool:
    """Whether the packed files are there and hold exactly the content of the entries."""
    if not all(path.exists() for path in files):
        return False
    train, heldout = (_map(path) for path in files)
    for entry in packed:
        head, tail = train[: entry.train_bytes], heldout[: entry.bytes - entry.train_bytes]
        if manifests.measure([head.data, tail.data]) != (entry.bytes, entry.sha256):
            return False
        train, heldout = train[len(head) :], heldout[len(tail) :]
    return len(train) == len(heldout) == 0


def _is_packed(entry: Entry) -> bool:
    return entry.source.compressed or entry.bytes < PACK_BELOW


def _view(described: Manifest, pack: np.ndarray, side: int) -> ByteView:
    """The pieces of one side in reading order; neighbours within the pack become one piece."""
    pieces: list[np.ndarray] = []
    begin = end = 0
    for entry in described.files:
        length = entry.bytes - entry.train_bytes if side else entry.train_bytes
        if _is_packed(entry):
            end += length
        elif length:
            pieces += [pack[begin:end], _map(Path(entry.path))[-length:] if side else _map(Path(entry.path))[:length]]
            begin = end
    return ByteView([*pieces, pack[begin:end]])


def _map(path: Path) -> np.ndarray:
    if not path.exists() or path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype=np.uint8)
    return np.memmap(path, dtype=np.uint8, mode="r")


def _pack(entries: Sequence[Entry], files: Sequence[Path]) -> None:
    """Stream the content of `entries` into one file a side, checking it against the manifest on the way."""
    files[0].parent.mkdir(parents=True, exist_ok=True)
    with replacing(files[0]) as train, replacing(files[1]) as heldout:
        for entry in entries:
            _copy(entry, train, heldout)


def _copy(entry: Entry, train: Any, heldout: Any) -> None:
    def written() -> Any:
        left = entry.train_bytes
        for chunk in entry.source.chunks():
            train.write(chunk[:left])
            heldout.write(chunk[left:])
            left = max(0, left - len(chunk))
            yield chunk

    if manifests.measure(written()) != (entry.bytes, entry.sha256):
        raise UserError(f"data: {entry.path} changed while it was being read; try again when it is written")
