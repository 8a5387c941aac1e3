"""`data.json` of a run: which files, how long, their sha256, and how many of their bytes are trained on.

The split is decided here, once. With twenty files or more a file is held out when its content's hash, as a fraction of
the largest one, is below the wished share: that depends on nothing else, so it stays held out when the corpus grows.
Where that gives less than half or more than double the bytes, files are taken in the order of their hashes until the
share is reached, copies of one content together. Below twenty files, or where none fits, the last bytes are held out.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from dormouse_train.data.sources import Source
from dormouse_train.errors import UserError
from dormouse_train.run_folder import replacing

NAME = "data.json"
SCHEMA = 1

SPLIT_BY_FILES_FROM = 20


@dataclass(frozen=True)
class Entry:
    """One file: `bytes` of content with their `sha256`, of which the first `train_bytes` are trained on."""

    path: str
    bytes: int
    sha256: str
    train_bytes: int

    @property
    def source(self) -> Source:
        """The file itself."""
        return Source(Path(self.path))


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
        """Bytes that are never trained on."""
        return sum(entry.bytes - entry.train_bytes for entry in self.files)

    def as_dict(self) -> dict[str, Any]:
        """What `data.json` holds."""
        totals = {"train_bytes": self.train_bytes, "heldout_bytes": self.heldout_bytes}
        return {"schema": SCHEMA, "name": self.name, **totals, "files": [asdict(entry) for entry in self.files]}


def describe(sources: Sequence[Source], name: str, heldout_fraction: float) -> Manifest:
    """Read every file once, in constant memory, and split them.

    Errors: `UserError` when the files hold fewer than two bytes for each side.
    """
    measured = [(str(source.path), *measure(source.chunks())) for source in sources]
    measured = [(path, size, digest) for path, size, digest in measured if size]  # an empty .gz is not an empty file
    kept = _train_bytes([size for _, size, _ in measured], [digest for *_, digest in measured], heldout_fraction)
    return Manifest(name, tuple(Entry(*file, train_bytes=n) for file, n in zip(measured, kept, strict=True)))


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
        if not entries or not all(isinstance(e.path, str) and 0 <= e.train_bytes <= e.bytes for e in entries):
            raise ValueError("it names no files, or not as it should")
        return Manifest(stored["name"], entries)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"data: {path} is damaged ({error}); start a new run, or put the file back") from None


def check(entries: Iterable[Entry]) -> None:
    """Every file still holds what the run began with; otherwise a `UserError` names the first one that does not."""
    for entry in entries:
        path = Path(entry.path)
        if not path.exists():
            raise UserError(f"data: {path} is missing since the run began; put it back, or start a new run")
        # What is no file any more, such as a pipe, is not opened: that may wait for ever.
        if not path.is_file() or measure(entry.source.chunks()) != (entry.bytes, entry.sha256):
            raise UserError(f"data: {path} has changed since the run began; put it back, or start a new run")
