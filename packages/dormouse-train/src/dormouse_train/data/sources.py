"""Which files are read, and their bytes as they are: no decoding, no newline folding, no mark stripped."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dormouse_train.data import rows, unpack
from dormouse_train.data.markov import PREFIX, Markov
from dormouse_train.errors import UserError
from dormouse_train.run_folder import holds_run

CHUNK = 1 << 20

NOT_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class File:
    """A file by its absolute path; what counts is its content: what it unpacks to, and of rows the text in them."""

    path: Path
    text_field: str = "text"
    """Which field of a row holds its text, for a file that has rows."""

    @property
    def name(self) -> str:
        """What a manifest calls it."""
        return str(self.path)

    @property
    def has_rows(self) -> bool:
        """Whether the file is rows of documents, by its name: JSON lines, also packed ones, or Parquet."""
        return self.path.suffix == ".parquet" or self._unpacked_suffix == ".jsonl"

    @property
    def is_raw(self) -> bool:
        """Whether the bytes on disk are the content."""
        return not self.has_rows and self.path.suffix not in unpack.SUFFIXES

    @property
    def _unpacked_suffix(self) -> str:
        return (self.path.with_suffix("") if self.path.suffix in unpack.SUFFIXES else self.path).suffix

    def chunks(self) -> Iterator[bytes]:
        """The content in pieces: of a file with rows a document each, of others at most a mebibyte.

        Errors: `UserError` for a file that is gone, may not be read, or is not what its name says.
        """
        try:
            if self.path.suffix == ".parquet":
                yield from rows.parquet(self.path, self.text_field)
                return
            with unpack.opened(self.path) as file:
                if self.has_rows:
                    yield from rows.json_lines(file, self.path, self.text_field)
                    return
                while chunk := file.read(CHUNK):
                    yield chunk
        except OSError as error:
            raise UserError(
                f"data: {self.path} cannot be read ({error.strerror or error}); mend or leave out the file"
            ) from None


Source = File | Markov


def named(name: str, text_field: str) -> Source:
    """The source that a manifest calls `name`."""
    return Markov.parse(name) if name.startswith(PREFIX) else File(Path(name), text_field)


def standard_library() -> list[File]:
    """The `.py` files of the running interpreter's own library, sorted, without its tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [path for path in _walk(root, skip=NOT_LIBRARY) if path.suffix == ".py" and path.stat().st_size]
    if not found:
        raise UserError(f"data: this Python has no library sources under {root}; pass --data with a file or folder")
    return [File(path) for path in found]


def find(paths: Sequence[str], text_field: str = "text") -> list[Source]:
    """The sources that `paths` (files, folders, globs, `markov:ORDER:SEED`) name, each once: in the order given.

    The files of a folder are sorted; it is read to its leaves, without empty and hidden files, and without the folders
    of earlier runs. Errors: `UserError` for a path that is missing, empty, or neither file nor folder.
    """
    found: dict[Path | str, Source] = {}
    for text in paths:
        if text.startswith(PREFIX):
            found.setdefault(text, Markov.parse(text))
            continue
        for path in _expand(text):
            found.setdefault(path.resolve(), File(path.absolute(), text_field))
    return list(found.values())


def pinned(text: str) -> str:
    """What `text` names, whatever the current folder is later. Errors: `UserError` for no text."""
    return text if text.startswith(PREFIX) else str(Path(expanded(text)).absolute())


def expanded(text: str) -> str:
    """`text` with `~` at its front replaced by the home folder, where there is one. Errors: `UserError` for no text."""
    if not text:
        raise UserError("data: a path is empty; give a file, a folder or a glob")
    return os.path.expanduser(text)


def _expand(text: str) -> list[Path]:
    path = Path(expanded(text))
    if path.is_dir():
        files = _nonempty(_walk(path))
        if not files:
            raise UserError(f"data: the folder {text} holds no bytes; give files with something in them")
        return files
    if path.exists():
        return [_regular(path, text)]
    if not glob.has_magic(text):
        raise UserError(f"data: {text} does not exist; give a file, a folder or a glob")
    matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
    files = _nonempty(file for match in matches for file in (_walk(match) if match.is_dir() else [match]))
    if not files:
        raise UserError(f"data: the glob {text} matches no bytes; give files with something in them")
    return files


def _regular(path: Path, text: str) -> Path:
    if not path.is_file():
        raise UserError(f"data: {text} is neither a file nor a folder; give a regular file")
    if path.stat().st_size == 0:
        raise UserError(f"data: {text} is empty; give a file with something in it")
    return path


def _nonempty(paths: Iterable[Path]) -> list[Path]:
    return [path for path in paths if path.is_file() and path.stat().st_size]


def _walk(root: Path, skip: frozenset[str] = frozenset()) -> list[Path]:
    """The files below `root` sorted by their parts, without hidden ones, folders named in `skip` and run folders."""
    found: list[Path] = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in skip and not name.startswith(".")]
        if holds_run(Path(folder)):  # its checkpoints and its copies of the data are not text
            names.clear()
            continue
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted(found)
