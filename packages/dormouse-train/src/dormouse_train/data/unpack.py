"""A file's content as a stream, unpacked where its name says that it is packed."""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, cast

from dormouse_train.errors import UserError, missing_extra

SUFFIXES = frozenset({".gz", ".zst"})


@contextmanager
def opened(path: Path) -> Generator[BinaryIO]:
    """The content of `path` as a binary stream: what `.gz` and `.zst` unpack to, all frames of it; other files as is.

    Errors: `UserError` for a packed file that is damaged or cut short, or a `.zst` without the extra `data`.
    """
    if path.suffix == ".gz":
        kind, opening, damage = "gzip", gzip.open, (gzip.BadGzipFile, EOFError, zlib.error)
    elif path.suffix == ".zst":
        zstd = _zstd(path)
        kind, opening, damage = "zstd", zstd.open, (zstd.ZstdError, EOFError)
    else:
        kind, opening, damage = "raw", open, ()
    try:
        with opening(path, "rb") as file:
            yield cast(BinaryIO, file)
    except damage as error:
        raise UserError(f"data: {path} is not a whole {kind} file ({error}); pack it again") from None


def _zstd(path: Path) -> ModuleType:
    """The standard library's module, from Python 3.14 on, or its backport."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError:
        raise missing_extra(f"data: {path} is zstd-packed", "backports.zstd", "data") from None
    return zstd
