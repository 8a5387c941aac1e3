"""One measurement is one flat row, one results file is one JSON array of rows. This module is the schema.

`machine, torch, triton, commit, date` say where a number comes from; a number without them is not a result.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

Word = Annotated[str, Field(pattern=r"^[a-z0-9_.+]+(-[a-z0-9_.+]+)*$")]


class RowsError(ValueError):
    """A results file that cannot be used; the message names the file, the row and what is wrong with it."""


class Origin(BaseModel):
    """Where rows come from: the same for every row of one run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    machine: str = Field(min_length=1)
    """The GPU's name, or the processor's with the number of threads used."""
    torch: str = Field(min_length=1)
    triton: str = Field(min_length=1)
    commit: str = Field(pattern=r"^([0-9a-f]{12}(-dirty)?|unknown)$")
    """Of this repository; `-dirty` when tracked files were changed."""
    date: datetime.date


class Row(Origin):
    """One measurement."""

    bench: Word
    """Which benchmark: `experts`, `moe`, `sweep`, `ceilings`."""
    shape: Word
    """`nano`, `b1`, ..., with variants after a hyphen (`b1-zipf`); for a ceiling the size that was measured."""
    phase: Word
    """`fwd`, `bwd` or `fwd+bwd` of a whole pass, `-graph` when replayed; a part's name for a part."""
    implementation: Word
    ms: float = Field(gt=0, allow_inf_nan=False)
    """Median milliseconds of one call."""
    floor_ms: float | None = Field(gt=0, allow_inf_nan=False)
    """What the machine's own ceilings allow; null where none is stated."""
    peak_extra_bytes: int | None = Field(ge=0)
    """Most bytes allocated during the work, less those before it and less the gradients; null on a CPU."""


ROWS = TypeAdapter(list[Row])
COLUMNS = (
    "bench", "shape", "phase", "implementation", "ms", "floor_ms", "peak_extra_bytes",
    "machine", "torch", "triton", "commit", "date",
)  # fmt: skip


def read(path: Path) -> list[Row]:
    """The rows of a results file. `RowsError` when it is missing, is no JSON array or holds a row that is not valid."""
    try:
        return ROWS.validate_json(path.read_bytes())
    except OSError as error:
        raise RowsError(f"{path} cannot be read ({error.strerror})") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise RowsError(f"{path} is not a results file: {where}: {first['msg']}") from error


def write(path: Path, rows: Iterable[Row]) -> None:
    """Replaces a results file by these rows, whole or not at all; one row a line, so that changes can be read."""
    flat = [row.model_dump(mode="json") for row in rows]
    lines = ",\n".join("  " + json.dumps({column: row[column] for column in COLUMNS}) for row in flat)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(f"[\n{lines}\n]\n")
    os.replace(part, path)


def origin(device: str, commit: str = "") -> Origin:
    """This machine, stack, commit and day. `device` is "cpu" or "cuda".

    `commit`: twelve digits of the commit that this tree was exported from, for a machine without git. Errors:
    `ValueError` for anything else, and where git knows better.
    """
    import torch

    if commit and not re.fullmatch(r"[0-9a-f]{12}", commit):
        raise ValueError(f"--commit is {commit!r}; pass the commit's first twelve hexadecimal digits")
    known = _commit()
    if commit and known not in ("unknown", commit):
        raise ValueError(f"--commit is {commit}, but git says {known}; leave it out")

    name = torch.cuda.get_device_name() if device == "cuda" else f"{_processor()}, {torch.get_num_threads()} threads"
    return Origin(
        machine=name,
        torch=torch.__version__,
        triton=metadata.version("triton"),
        commit=commit or known,
        date=datetime.date.today(),
    )


def _processor() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found.group(1).strip() if found else "unknown processor"


def _commit() -> str:
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        return _git("describe", "--always", "--abbrev=12", "--exclude=*", "--dirty")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # an installed copy, or a machine without git


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=Path(__file__).parent, check=True, capture_output=True, text=True).stdout.strip()
