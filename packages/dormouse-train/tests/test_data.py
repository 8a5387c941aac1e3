from __future__ import annotations

import gzip
import hashlib
import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from dormouse_train.config import DataSection
from dormouse_train.data import ByteView, corpus, open_corpus, open_paths, packing
from dormouse_train.data.sources import find, standard_library
from dormouse_train.errors import UserError

AWKWARD = b"\xef\xbb\xbfa\r\n\rc\xff\xfe\x00\xe2\x80\xa9"


def opened(run: Path, *paths: Path | str, fraction: float = 0.05) -> corpus.Corpus:
    run.mkdir(exist_ok=True)
    return open_corpus(DataSection(paths=tuple(map(str, paths)), heldout_fraction=fraction), run)


def content(view: ByteView) -> bytes:
    return view.read(0, len(view)).tobytes()


def many(folder: Path, n: int, size: int = 500) -> list[Path]:
    folder.mkdir(parents=True)
    paths = [folder / f"{index:03}.txt" for index in range(n)]
    for index, path in enumerate(paths):
        path.write_bytes(np.random.default_rng(index).bytes(size + index))
    return paths


def test_bytes_in_are_bytes_trained_on(tmp_path: Path):
    assert len(AWKWARD) == 14
    file = tmp_path / "awkward.txt"
    file.write_bytes(AWKWARD)
    data = opened(tmp_path / "run", file)
    assert content(data.train) + content(data.heldout) == AWKWARD
    assert data.manifest()["files"][0]["sha256"] == hashlib.sha256(AWKWARD).hexdigest()


def test_a_gzip_file_is_the_bytes_that_it_unpacks_to(tmp_path: Path):
    file = tmp_path / "awkward.gz"
    file.write_bytes(gzip.compress(AWKWARD))
    data = opened(tmp_path / "run", file)
    assert content(data.train) + content(data.heldout) == AWKWARD


def test_the_default_is_the_librarys_sources_sorted_without_tests_and_packages():
    paths = [source.path for source in standard_library()]
    assert len(paths) > 400
    assert paths == sorted(paths)
    assert all(path.suffix == ".py" and path.stat().st_size for path in paths)
    parts = {part for path in paths for part in path.parts}
    assert not parts & {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    assert {"argparse.py", "asyncio"} <= parts


def test_the_default_corpus_holds_out_about_a_twentieth(tmp_path: Path):
    data = opened(tmp_path / "run")
    total = len(data.train) + len(data.heldout)
    assert total > 8_000_000
    assert 0.025 <= len(data.heldout) / total <= 0.1
    assert "standard library of Python 3." in data.name


def test_files_come_in_the_order_given_and_those_of_a_folder_sorted(tmp_path: Path):
    for name in ["b/2", "b/10", "b/c/1", "a", ".hidden", "b/.git/x", "empty"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty" else name)
    names = [str(Path(source.name).relative_to(tmp_path)) for source in find([f"{tmp_path}/b", str(tmp_path)])]
    assert names == ["b/10", "b/2", "b/c/1", "a"]
    assert [Path(s.name).name for s in find([f"{tmp_path}/**/[0-9]*"])] == ["10", "2", "1"]


def test_a_run_folder_below_the_data_is_not_data(tmp_path: Path):
    paths = many(tmp_path / "books", 3)
    opened(tmp_path / "books" / "run", tmp_path / "books")
    (tmp_path / "books" / "run" / "config.toml").write_text("x")
    assert [source.name for source in find([str(tmp_path / "books")])] == list(map(str, paths))


@pytest.mark.parametrize(
    "left",
    [
        [".lock", "data/train.bin.tmp"],
        [".lock", "data/train.bin", "data/heldout.bin", "data.json"],
        [".lock", "data.json", "data/train.bin", "notes.txt"],
        ["checkpoints/step-3/manifest.json", "metrics.jsonl"],
    ],
    ids=["killed while packing", "killed after packing", "without its configuration", "checkpoints alone"],
)
def test_what_is_left_of_a_run_is_not_data(tmp_path: Path, left: list[str]):
    paths = many(tmp_path / "books", 3)
    for name in left:
        file = tmp_path / "books" / "run" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    assert [source.name for source in find([str(tmp_path / "books")])] == list(map(str, paths))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.mkdir(), "holds no bytes"),
        (os.mkfifo, "neither a file nor a folder"),
        (lambda path: path.write_bytes(b"abc"), "3 bytes in all; give at least 4"),
    ],
    ids=["missing", "empty", "empty folder", "pipe", "three bytes"],
)
def test_a_path_without_bytes_is_refused_by_name(tmp_path: Path, make, says: str):
    make(tmp_path / "thing")
    with pytest.raises(UserError) as refused:
        opened(tmp_path / "run", tmp_path / "thing")
    assert says in str(refused.value)
    assert "thing" in str(refused.value) or "bytes in all" in says


def test_a_glob_that_matches_nothing_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="matches no bytes"):
        find([f"{tmp_path}/*.txt"])


@pytest.mark.parametrize("damage", [lambda whole: whole[:-9], lambda whole: b"not gzip", lambda whole: whole[:20] * 2])
def test_damaged_gzip_is_refused_by_name(tmp_path: Path, damage):
    file = tmp_path / "books.gz"
    file.write_bytes(damage(gzip.compress(np.random.default_rng(0).bytes(1000))))
    with pytest.raises(UserError, match=r"books.gz is not a whole gzip file"):
        opened(tmp_path / "run", file)


def test_under_twenty_files_the_last_twentieth_of_the_bytes_is_held_out(tmp_path: Path):
    paths = many(tmp_path / "books", 19)
    data = opened(tmp_path / "run", tmp_path / "books")
    everything = b"".join(path.read_bytes() for path in paths)
    cut = len(everything) - round(0.05 * len(everything))
    assert content(data.train) == everything[:cut]
    assert content(data.heldout) == everything[cut:]


def test_from_twenty_files_on_whole_files_are_held_out_by_their_content(tmp_path: Path):
    paths = many(tmp_path / "books", 40)
    data = opened(tmp_path / "run", tmp_path / "books")
    chosen = {entry.path for entry in data.files.files if entry.train_bytes == 0}
    assert all(entry.train_bytes in (0, entry.bytes) for entry in data.files.files)
    assert 1 <= len(chosen) <= 4
    assert content(data.heldout) == b"".join(path.read_bytes() for path in paths if str(path) in chosen)
    assert content(data.train) == b"".join(path.read_bytes() for path in paths if str(path) not in chosen)

    (tmp_path / "other").mkdir()
    for index, path in enumerate(reversed(paths)):
        (tmp_path / "other" / f"{index:03}").write_bytes(path.read_bytes())
    renamed = opened(tmp_path / "run2", tmp_path / "other")
    assert sorted(content(renamed.heldout)) == sorted(content(data.heldout))


def test_a_file_stays_on_its_side_when_the_corpus_grows(tmp_path: Path):
    paths = many(tmp_path / "books", 400)
    few, all_of_them = opened(tmp_path / "few", *paths[:200]), opened(tmp_path / "all", *paths)
    sides = {entry.path: entry.train_bytes == 0 for entry in all_of_them.files.files}
    assert {entry.path: entry.train_bytes == 0 for entry in few.files.files}.items() <= sides.items()
    for data in (few, all_of_them):
        assert 0.025 <= len(data.heldout) / (len(data.heldout) + len(data.train)) <= 0.1


@pytest.mark.parametrize("n", [20, 25, 30, 50, 100])
def test_a_few_files_are_split_into_near_the_wished_share_too(tmp_path: Path, n: int):
    data = opened(tmp_path / "run", *many(tmp_path / "books", n))
    assert 0.025 <= len(data.heldout) / (len(data.heldout) + len(data.train)) <= 0.1
    assert all(entry.train_bytes in (0, entry.bytes) for entry in data.files.files)


def test_copies_of_a_file_are_on_one_side(tmp_path: Path):
    for index, path in enumerate(many(tmp_path / "books", 200)):
        path.write_bytes(b"%d" % (index // 4) * 50)
    data = opened(tmp_path / "run", tmp_path / "books")
    sides: dict[str, set[bool]] = {}
    for entry in data.files.files:
        sides.setdefault(entry.sha256, set()).add(entry.train_bytes == 0)
    assert all(len(side) == 1 for side in sides.values())
    assert {True} in sides.values()


def test_twenty_copies_of_one_file_are_still_split(tmp_path: Path):
    for path in many(tmp_path / "books", 20):
        path.write_bytes(b"the same words\n" * 10)
    data = opened(tmp_path / "run", tmp_path / "books")
    assert len(data.heldout) == 150


def test_large_files_are_mapped_in_place_and_small_ones_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packing, "PACK_BELOW", 10_000)
    sizes = [100, 50_000, 300, 400, 20_000, 30]
    paths = [tmp_path / str(index) for index in range(6)]
    for path, size in zip(paths, sizes, strict=True):
        path.write_bytes(np.random.default_rng(size).bytes(size))
    data = opened(tmp_path / "run", *paths)
    everything = b"".join(path.read_bytes() for path in paths)
    assert content(data.train) + content(data.heldout) == everything
    assert sum(path.stat().st_size for path in (tmp_path / "run" / "data").iterdir()) == 830
    for start in (0, 99, 100, 50_099, 50_100, 50_799, 50_800):
        assert data.train.read(start, 1000).tobytes() == everything[start : start + 1000]


def test_a_view_has_no_bytes_outside_itself():
    view = ByteView([np.arange(5, dtype=np.uint8), np.empty(0, np.uint8), np.arange(5, 9, dtype=np.uint8)])
    assert view.read(3, 4).tolist() == [3, 4, 5, 6]
    assert view.read(9, 0).tolist() == []
    for start, n in [(8, 2), (-1, 2), (10, 0)]:
        with pytest.raises(IndexError):
            view.read(start, n)


def test_packing_needs_constant_memory(tmp_path: Path):
    file = tmp_path / "zeros.gz"
    with gzip.open(file, "wb", compresslevel=1) as out:
        for _ in range(64):
            out.write(bytes(1 << 20))
    tracemalloc.start()
    data = opened(tmp_path / "run", file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(data.train) + len(data.heldout) == 64 << 20
    assert peak < 8 << 20


def test_a_second_opening_reads_the_same_bytes_from_the_manifest(tmp_path: Path):
    many(tmp_path / "books", 30)
    first = opened(tmp_path / "run", tmp_path / "books")
    before = content(first.train), content(first.heldout)
    (tmp_path / "books" / "999.txt").write_text("a file that came later")
    second = opened(tmp_path / "run", tmp_path / "books")
    assert (content(second.train), content(second.heldout)) == before
    stored = json.loads((tmp_path / "run" / "data.json").read_text())
    assert stored == second.manifest() == first.manifest()


CHANGES = {
    "is missing": lambda path: path.unlink(),
    "has changed": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"!"),
    "has changed since": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize(("says", "change"), CHANGES.items())
@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "its pack damaged"])
def test_a_file_that_is_not_what_it_was_is_named(tmp_path: Path, says: str, change, mapped: bool, monkeypatch):
    if mapped:
        monkeypatch.setattr(packing, "PACK_BELOW", 1)
    paths = many(tmp_path / "books", 5)
    opened(tmp_path / "run", tmp_path / "books")
    if not mapped:
        os.truncate(tmp_path / "run" / "data" / "train.bin", 99)
    change(paths[3])
    with pytest.raises(UserError, match=f"003.txt {says}"):
        opened(tmp_path / "run", tmp_path / "books")


def test_a_copy_that_is_whole_stands_for_files_that_are_gone(tmp_path: Path):
    paths = many(tmp_path / "books", 5)
    with gzip.open(tmp_path / "books" / "more.gz", "wb") as file:
        file.write(b"packed " * 99)
    before = opened(tmp_path / "run", tmp_path / "books")
    paths[2].unlink()
    (tmp_path / "books" / "more.gz").write_bytes(b"no gzip")
    after = opened(tmp_path / "run", tmp_path / "books")
    assert content(after.train) == content(before.train)
    assert content(after.heldout) == content(before.heldout)


@pytest.mark.parametrize(
    "files",
    [
        [],
        [{"path": 1, "bytes": 9, "sha256": "", "train_bytes": 3}],
        [{"path": "a", "bytes": "x", "sha256": "", "train_bytes": 3}],
        [{"path": "a", "bytes": 2, "sha256": "", "train_bytes": 3}],
    ],
    ids=["none", "no path", "no number", "more to train on than there is"],
)
def test_a_manifest_that_no_run_wrote_is_named(tmp_path: Path, files: list[dict[str, object]]):
    (tmp_path / "data.json").write_text(json.dumps({"schema": 1, "name": "x", "files": files}))
    with pytest.raises(UserError, match=r"data.json is damaged"):
        opened(tmp_path, tmp_path / "books")


@pytest.mark.parametrize(("text", "says"), [("", "a path is empty"), ("~nobody-of-that-name/x", "does not exist")])
def test_a_path_that_is_empty_or_of_nobody_is_refused(text: str, says: str):
    with pytest.raises(UserError, match=says):
        find([text])


def test_a_folder_that_contains_itself_is_read_once(tmp_path: Path):
    paths = many(tmp_path / "books", 2)
    (tmp_path / "books" / "up").symlink_to("..")
    (tmp_path / "books" / "self").symlink_to("self")
    os.mkfifo(tmp_path / "books" / "pipe")
    assert [source.name for source in find([str(tmp_path / "books")])] == list(map(str, paths))


def test_names_need_not_be_utf8(tmp_path: Path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / os.fsdecode(b"\xff\xfe.txt")).write_bytes(b"words " * 99)
    first = opened(tmp_path / "run", tmp_path / "books")
    assert content(opened(tmp_path / "run", tmp_path / "books").train) == content(first.train)


def test_a_damaged_pack_is_packed_again(tmp_path: Path):
    many(tmp_path / "books", 5)
    before = content(opened(tmp_path / "run", tmp_path / "books").train)
    pack = tmp_path / "run" / "data" / "train.bin"
    damaged = bytearray(pack.read_bytes())
    damaged[7] ^= 1
    pack.write_bytes(damaged)
    assert content(opened(tmp_path / "run", tmp_path / "books").train) == before
    pack.unlink()
    assert content(opened(tmp_path / "run", tmp_path / "books").train) == before


def test_a_damaged_manifest_is_named(tmp_path: Path):
    many(tmp_path / "books", 3)
    opened(tmp_path / "run", tmp_path / "books")
    (tmp_path / "run" / "data.json").write_text("{")
    with pytest.raises(UserError, match=r"data.json is damaged"):
        opened(tmp_path / "run", tmp_path / "books")


def test_bytes_to_score_are_all_bytes_of_the_paths(tmp_path: Path):
    paths = many(tmp_path / "books", 30)
    view = open_paths([str(tmp_path / "books")], tmp_path / "scratch")
    assert content(view) == b"".join(path.read_bytes() for path in paths)
