"""Which files are read, and their bytes as they are: no decoding, no newline folding, no mark stripped."""

from __future__ import annotations

import glob
import gzip
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dormouse_train.errors import UserError
from dormouse_train.run_folder import holds_run

CHUNK = 1 << 20

NOT_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Source:
    """A file by its absolute path; what counts is its content, which for `.gz` is what it unpacks to."""

    path: Path

    @property
    def compressed(self) -> bool:
        """Whether the bytes have to be unpacked, by the file's name."""
        return self.path.suffix == ".gz"

    def chunks(self) -> Iterator[bytes]:
        """The content in pieces of at most a mebibyte.

        Errors: `UserError` for a file that is gone, may not be read, or is damaged gzip.
        """
        try:
            with gzip.open(self.path) if self.compressed else self.path.open("rb") as file:
                while chunk := file.read(CHUNK):
                    yield chunk
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UserError(f"data: {self.path} is not a whole gzip file ({error}); pack it again") from None
        except OSError as error:
            raise UserError(
                f"data: {self.path} cannot be read ({error.strerror}); mend or leave out the file"
            ) from None


def standard_library() -> list[Source]:
    """The `.py` files of the running interpreter's own library, sorted, without its tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [path for path in _walk(root, skip=NOT_LIBRARY) if path.suffix == ".py" and path.stat().st_size]
    if not found:
        raise UserError(f"data: this Python has no library sources under {root}; pass --data with a file or folder")
    return [Source(path) for path in found]


def find(paths: Sequence[str]) -> list[Source]:
    """The files that `paths` (files, folders, globs) name, each once: in the order given, those of a folder sorted.

    A folder is read to its leaves, without empty and hidden files, and without the folders of earlier runs.
    Errors: `UserError` for a path that is missing, empty, or neither file nor folder.
    """
    found: dict[Path, Source] = {}
    for text in paths:
        for path in _expand(text):
            found.setdefault(path.resolve(), Source(path.absolute()))
    return list(found.values())


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
