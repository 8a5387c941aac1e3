"""The installed commands, run in processes of their own, and one tiny run that many tests read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

TINY = """
[model]
d_model = 32
num_heads = 2
head_dim = 16

[experts]
num_experts = 4
rank = 4
shared_rank = 8
d_ffn = 37

[engram]
enabled = true
rows = 300
dim = 8

[train]
batch = 2
seq = 32
steps = 6
warmup = 2
device = "cpu"

[eval]
every = 3
window_bytes = 256
sample_bytes = 8

[checkpoint]
every = 1
keep = 10

[log]
every = 1
"""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """What is on stderr after a user's mistake: one sentence and no traceback, exit code 2."""
        assert self.code == 2, (self.code, self.out, self.err)
        assert self.err.startswith("error: ")
        assert self.err.index("\n") == len(self.err) - 1
        return self.err.removeprefix("error: ").rstrip("\n")


@dataclass(frozen=True)
class Commands:
    """The console scripts of this environment in the folder `here`, with one thread and no CUDA device.

    `bytecode` is a folder that they share: without bytecode importing torch takes twice as long, each time.
    """

    here: Path
    bytecode: Path

    def start(self, script: str, *arguments: str | Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(Path(sys.executable).parent / script), *map(str, arguments)],
            cwd=self.here,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="surrogateescape",
        )

    def environment(self) -> dict[str, str]:
        return os.environ | {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPYCACHEPREFIX": str(self.bytecode),
            "PYTHONDONTWRITEBYTECODE": "",
        }

    def __call__(self, script: str, *arguments: str | Path) -> Ended:
        process = self.start(script, *arguments)
        out, err = process.communicate(timeout=180)
        return Ended(process.returncode, out, err)

    def train(self, run: str, *arguments: str | Path) -> Ended:
        return self("train", "--config", "tiny.toml", "--data", "words.txt", "--run", run, *arguments)


def furnished(folder: Path, bytecode: Path) -> Commands:
    """`folder` with a tiny configuration and something to train on."""
    (folder / "tiny.toml").write_text(TINY)
    (folder / "words.txt").write_bytes(b"".join(b"the number %d comes before %d\r\n" % (n, n + 1) for n in range(400)))
    return Commands(folder, bytecode)


@pytest.fixture(scope="session")
def bytecode(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands of all tests keep their bytecode."""
    return tmp_path_factory.mktemp("bytecode")


@pytest.fixture
def command(tmp_path: Path, bytecode: Path) -> Commands:
    """The commands in a folder of the test's own."""
    return furnished(tmp_path, bytecode)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, bytecode: Path) -> tuple[Path, Ended]:
    """A run of 6 steps that nothing interrupted, and how its command ended. Copy it before changing it."""
    command = furnished(tmp_path_factory.mktemp("finished"), bytecode)
    ended = command.train("run")
    assert ended.code == 0, ended.err
    return command.here / "run", ended


@pytest.fixture
def copied(finished: tuple[Path, Ended], command: Commands) -> Path:
    """A copy of the finished run beside the same data, to be damaged or resumed: `run` in the folder of `command`."""
    config = (finished[0] / "config.toml").read_text().replace(str(finished[0].parent), str(command.here))
    run = command.here / "run"
    shutil.copytree(finished[0], run)
    (run / "config.toml").write_text(config)
    data = (run / "data.json").read_text().replace(str(finished[0].parent), str(command.here))
    (run / "data.json").write_text(data)
    return run
