"""Data larger than memory: it is converted and read where the process may hold far less than it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from dormouse_train.data import unpack
from pyarrow import parquet

MEBI = 1 << 20
CONTENT = 96 * MEBI
ALLOWED = 32 * MEBI
"""What the process may hold beyond what it holds once all is imported: a third of the content."""

READER = f"""
import resource, sys
from pathlib import Path
import numpy, pyarrow.parquet
from dormouse_train.config import DataSection
from dormouse_train.data import Batches, open_corpus
from dormouse_train.data.unpack import opened

held = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (held + {ALLOWED}, held + {ALLOWED}))
run = Path(sys.argv[2])
for _ in range(2):
    corpus = open_corpus(DataSection(paths=(sys.argv[1],)), run)
    rows = Batches(corpus.train, batch=4, seq=256, seed=0).at(7)
    assert rows.shape == (4, 257) and len(corpus.train.documents_in(0, 3 << 20)) in (1, 3), corpus.train.documents[:4]
print(len(corpus.train) + len(corpus.heldout))
if sys.argv[3:]:
    corpus.train.read(0, {CONTENT} // 2)
"""


def write(path: Path) -> Path:
    """Documents of a mebibyte that repeat one of random letters."""
    letters = np.random.default_rng(0).integers(97, 123, MEBI, dtype=np.uint8).tobytes()
    if path.suffix == ".parquet":
        rows = CONTENT // MEBI
        table = pyarrow.table({"text": [letters.decode()] * rows})
        pages = {"row_group_size": rows // 2, "write_batch_size": 1, "use_dictionary": False}
        parquet.write_table(table, path, compression="zstd", **pages)
        return path
    line = b'{"text": "' + letters + b'"}\n' if ".jsonl" in path.name else letters
    with unpack._zstd(path).open(path, "wb") if path.suffix == ".zst" else path.open("wb") as file:
        for _ in range(CONTENT // MEBI):
            file.write(line)
    return path


def read(path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", READER, str(path), str(path.parent / "run"), *more]
    (path.parent / "run").mkdir()
    # Arrow's own allocator reserves a gibibyte at once, which the limit would count.
    variables = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | variables)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.zst", "a.parquet"])
def test_data_of_three_times_the_memory_is_opened_twice_and_read(tmp_path: Path, name: str):
    done = read(write(tmp_path / name))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == CONTENT


def test_the_limit_is_one_that_the_content_would_break(tmp_path: Path):
    done = read(write(tmp_path / "a.jsonl.zst"), "whole")
    assert done.stdout == f"{CONTENT}\n"
    assert "MemoryError" in done.stderr
