"""`data.json` of a run: which files, how long, their sha256, and how many of their bytes are trained on.

The split is decided here, once. With twenty files or more a file is held out when its content's hash, as a fraction of
the largest one, is below the wished share: that depends on nothing else, so it stays held out when the corpus grows.
Where that gives less than half or more than double the bytes, files are taken in the order of their hashes until the
share is reached, copies of one content together. Below twenty files, or where none fits, the last bytes are held out.

Two cases know their split: files that are held out by name are so whole, beside others that are trained on whole; and
the file `enwik8` of 100,000,000 bytes has the split that its published numbers are of, 90 % to train on, then 5 % held
out, then 5 % to test on.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from dormouse_train.data.markov import Markov
from dormouse_train.data.sources import File, Source, named
from dormouse_train.errors import UserError
from dormouse_train.run_folder import replacing

NAME = "data.json"
SCHEMA = 1

SPLIT_BY_FILES_FROM = 20

ENWIK8 = "enwik8"
ENWIK8_BYTES = 100_000_000
ENWIK8_PART = 5_000_000
"""Bytes held out, and as many to test on."""


@dataclass(frozen=True)
class Entry:
    """One file: `bytes` of content with their `sha256`: first those to train on, then those held out, then the test's.

    `path` is what the manifest calls the source, and `text_field` is that of a file with rows.
    """

    path: str
    bytes: int
    sha256: str
    train_bytes: int
    test_bytes: int = 0
    text_field: str | None = None

    @property
    def heldout_bytes(self) -> int:
        """Bytes that are neither trained on nor kept for a test."""
        return self.bytes - self.train_bytes - self.test_bytes

    @property
    def source(self) -> Source:
        """What holds the content."""
        return named(self.path, self.text_field or "")

    def as_dict(self) -> dict[str, Any]:
        """What `data.json` holds of it: what most files lack is left out."""
        return {key: value for key, value in asdict(self).items() if value not in (None, 0) or key == "train_bytes"}


@dataclass(frozen=True)
class Manifest:
    """All files of a corpus in reading order, and what they are called together."""

    name: str
    files: tuple[Entry, ...]

    @property
    def train_bytes(self) -> int:
        """Bytes that are trained on."""
        return sum(entry.train_bytes for entry in self.files)

    @property
    def heldout_bytes(self) -> int:
        """Bytes that are never trained on and scored while training."""
        return sum(entry.heldout_bytes for entry in self.files)

    @property
    def test_bytes(self) -> int:
        """Bytes that a run never reads, zero where the split has no test part."""
        return sum(entry.test_bytes for entry in self.files)

    def as_dict(self) -> dict[str, Any]:
        """What `data.json` holds."""
        totals = {"train_bytes": self.train_bytes, "heldout_bytes": self.heldout_bytes}
        return {"schema": SCHEMA, "name": self.name, **totals, "files": [entry.as_dict() for entry in self.files]}


def describe(sources: Sequence[Source], name: str, heldout_fraction: float, heldout: Sequence[Source] = ()) -> Manifest:
    """Read every file once, in constant memory, and split them; `heldout`, where given, is the whole held-out part.

    Errors: `UserError` when the files hold fewer than two bytes for each side, or one content is on both sides.
    """
    entries = measured(sources)
    if heldout:
        return Manifest(name, _split_by_name(entries, measured(heldout)))
    if [(Path(entry.path).name, entry.bytes) for entry in entries] == [(ENWIK8, ENWIK8_BYTES)]:
        train = ENWIK8_BYTES - 2 * ENWIK8_PART
        return Manifest(name, (replace(entries[0], train_bytes=train, test_bytes=ENWIK8_PART),))
    kept = _train_bytes([entry.bytes for entry in entries], [entry.sha256 for entry in entries], heldout_fraction)
    return Manifest(name, tuple(replace(entry, train_bytes=n) for entry, n in zip(entries, kept, strict=True)))


def measured(sources: Sequence[Source]) -> list[Entry]:
    """Every source that holds anything, read once, all of it held out as yet; an empty .gz is not an empty file."""
    entries = []
    for source in sources:
        field = source.text_field if isinstance(source, File) and source.has_rows else None
        size, digest = measure(source.chunks())
        entries.append(Entry(source.name, size, digest, train_bytes=0, text_field=field))
    return [entry for entry in entries if entry.bytes]


def _split_by_name(train: list[Entry], heldout: list[Entry]) -> tuple[Entry, ...]:
    for side, entries in (("--data", train), ("--val", heldout)):
        if sum(entry.bytes for entry in entries) < 2:
            raise UserError(f"data: {side} holds fewer than 2 bytes; give files with something in them")
    trained = {entry.sha256: entry.path for entry in train}
    for entry in heldout:
        if entry.sha256 in trained:
            raise UserError(
                f"data: {entry.path} is held out and {trained[entry.sha256]}, with the same bytes, is trained on; "
                "give it on one side"
            )
    return (*(replace(entry, train_bytes=entry.bytes) for entry in train), *heldout)


def library_name() -> str:
    """What the default corpus is called: it differs between versions of Python, so the version is part of it."""
    return f"standard library of Python {platform.python_version()}"


def measure(chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """(bytes, sha256 in hex) of a content."""
    size, digest = 0, hashlib.sha256()
    for chunk in chunks:
        size += len(chunk)
        digest.update(chunk)
    return size, digest.hexdigest()


def _train_bytes(sizes: list[int], digests: list[str], fraction: float) -> list[int]:
    total = sum(sizes)
    if total < 4:
        raise UserError(f"data: the files hold {total} bytes in all; give at least 4, two to train on and two held out")
    heldout = _heldout_files(sizes, digests, fraction) if len(sizes) >= SPLIT_BY_FILES_FROM else set()
    if heldout:
        return [0 if index in heldout else size for index, size in enumerate(sizes)]
    kept, left = [], total - min(max(2, round(fraction * total)), total - 2)
    for size in sizes:
        kept.append(min(size, left))
        left -= kept[-1]
    return kept


def _heldout_files(sizes: list[int], digests: list[str], fraction: float) -> set[int]:
    target = max(2.0, fraction * sum(sizes))
    chosen = {index for index, digest in enumerate(digests) if int(digest[:16], 16) < fraction * 2**64}
    if target / 2 <= sum(sizes[index] for index in chosen) <= target * 2:
        return chosen
    return _first_files(sizes, digests, target)


def _first_files(sizes: list[int], digests: list[str], target: float) -> set[int]:
    """Files in the order of their hashes up to `target` bytes, passing over those that would overshoot by half."""
    chosen: set[int] = set()
    taken = 0
    by_content = sorted(range(len(sizes)), key=lambda index: digests[index])
    for _, copies in groupby(by_content, key=lambda index: digests[index]):
        group = list(copies)
        size = sum(sizes[index] for index in group)
        if taken + size <= 1.5 * target:
            chosen.update(group)
            taken += size
        if taken >= target:
            break
    return chosen if taken >= 2 else set()


def save(manifest: Manifest, run: Path) -> None:
    """Write `run/data.json`, whole or not at all."""
    with replacing(run / NAME) as file:
        file.write(json.dumps(manifest.as_dict(), indent=1).encode())


def load(run: Path) -> Manifest:
    """Read `run/data.json`; `UserError` names it when it is damaged."""
    path = run / NAME
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["schema"] != SCHEMA:
            raise UserError(f"data: {path} has schema {stored['schema']}, this version reads {SCHEMA}; start a new run")
        entries = tuple(Entry(**entry) for entry in stored["files"])
        if not entries or not all(isinstance(e.path, str) and e.train_bytes >= 0 <= e.heldout_bytes for e in entries):
            raise ValueError("it names no files, or not as it should")
        return Manifest(stored["name"], entries)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"data: {path} is damaged ({error}); start a new run, or put the file back") from None


def check(entries: Iterable[Entry]) -> None:
    """Every file still holds what the run began with; otherwise a `UserError` names the first one that does not."""
    for entry in entries:
        if isinstance(entry.source, File) and not Path(entry.path).exists():
            raise UserError(f"data: {entry.path} is missing since the run began; put it back, or start a new run")
        # What is no file any more, such as a pipe, is not opened: that may wait for ever.
        opened = isinstance(entry.source, Markov) or Path(entry.path).is_file()
        if not opened or measure(entry.source.chunks()) != (entry.bytes, entry.sha256):
            raise UserError(f"data: {entry.path} has changed since the run began; put it back, or start a new run")
