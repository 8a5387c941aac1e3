"""Streaming the content of files into one packed file a side, with an index of where documents begin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np

from dormouse_train.data import manifest as manifests
from dormouse_train.data.manifest import Entry
from dormouse_train.data.sources import File
from dormouse_train.errors import UserError
from dormouse_train.run_folder import replacing

SIDES = ("train", "heldout")

PACK_BELOW = 16 << 20
"""Raw files from this many bytes on are mapped where they lie; all others are packed, as maps are few."""

BYTE = np.dtype(np.uint8)
POSITION = np.dtype("<i8")
"""A position of the index: `<side>.documents` is ascending ones, counted in the bytes of its side."""


def is_packed(entry: Entry) -> bool:
    """Whether the content is copied into the run, and not mapped where it lies."""
    source = entry.source
    return not (isinstance(source, File) and source.is_raw) or entry.bytes < PACK_BELOW


def has_rows(entry: Entry) -> bool:
    """Whether the content is many documents, one a row."""
    return entry.text_field is not None


def names(entries: Sequence[Entry]) -> list[str]:
    """What packing `entries` leaves in its folder: bytes of each side, then, where there are rows, their indexes."""
    kinds = [".bin"] * any(map(is_packed, entries)) + [".documents"] * any(map(has_rows, entries))
    return [side + kind for kind in kinds for side in SIDES]


def pack(entries: Sequence[Entry], folder: Path) -> None:
    """Write the packed bytes and indexes of all `entries` to `folder`, checking the content against the manifest.

    Errors: `UserError` naming a file whose content is no longer what its entry says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        files = [stack.enter_context(replacing(folder / name)) for name in names(entries)]
        indexes = files[len(SIDES) :] or [None] * len(SIDES)
        sides = [_Side(file, index) for file, index in zip(files[: len(SIDES)], indexes, strict=True)]
        for entry in entries:
            _add(entry, *sides)


class _Side:
    """One packed file as it grows, and the index of the view that it becomes part of."""

    def __init__(self, file: BinaryIO, index: BinaryIO | None) -> None:
        self.begins = True
        """Whether the next byte begins a document."""
        self._file, self._index = file, index
        self._at = 0

    def write(self, chunk: bytes) -> None:
        """Append to the packed file."""
        self.skip(len(chunk))
        self._file.write(chunk)

    def skip(self, nbytes: int) -> None:
        """Count bytes of the view."""
        if nbytes and self.begins and self._index is not None:
            self._index.write(self._at.to_bytes(POSITION.itemsize, "little"))
        self.begins = self.begins and not nbytes
        self._at += nbytes


def _add(entry: Entry, train: _Side, heldout: _Side) -> None:
    train.begins = heldout.begins = True
    if not is_packed(entry):
        train.skip(entry.train_bytes)
        heldout.skip(entry.heldout_bytes)
        return

    def copied() -> Iterator[bytes]:
        left = entry.train_bytes
        for chunk in entry.source.chunks():
            if has_rows(entry):
                train.begins = heldout.begins = True
            train.write(chunk[:left])
            heldout.write(chunk[left:])
            left = max(0, left - len(chunk))
            yield chunk

    if manifests.measure(copied()) != (entry.bytes, entry.sha256):
        raise UserError(f"data: {entry.path} changed while it was being read; try again when it is written")


def is_whole(entries: Sequence[Entry], folder: Path) -> bool:
    """Whether what packing `entries` leaves is there, and its bytes are exactly theirs."""
    if not all((folder / name).exists() for name in names(entries)):
        return False
    packed = [entry for entry in entries if is_packed(entry)]
    train, heldout = (mapped(folder / f"{side}.bin") for side in SIDES)
    for entry in packed:
        head, tail = train[: entry.train_bytes], heldout[: entry.heldout_bytes]
        if manifests.measure([head.data, tail.data]) != (entry.bytes, entry.sha256):
            return False
        train, heldout = train[len(head) :], heldout[len(tail) :]
    return len(train) == len(heldout) == 0


def mapped(path: Path, dtype: np.dtype = BYTE) -> np.ndarray:
    """The file's content as a read-only map; what is empty or not there has none."""
    if not path.exists() or path.stat().st_size == 0:
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def documents(entries: Sequence[Entry], folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Where documents begin in each side's view, ascending int64: the index, or one a file where none has rows."""
    if any(map(has_rows, entries)):
        train, heldout = (mapped(folder / f"{side}.documents", POSITION) for side in SIDES)
        return train, heldout
    return _starts([e.train_bytes for e in entries]), _starts([e.heldout_bytes for e in entries])


def _starts(lengths: Sequence[int]) -> np.ndarray:
    kept = np.array([0, *(length for length in lengths if length)], dtype=np.int64)
    return np.cumsum(kept)[:-1]
