"""Bytes from packed files and from rows, held out by name, and where their documents begin."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import dormouse_train
import numpy as np
import pyarrow
import pytest
from dormouse_train.commands import evaluate, info
from dormouse_train.config import DataSection
from dormouse_train.data import ByteView, Corpus, manifest, open_corpus, open_paths, packing, sources, unpack
from dormouse_train.data.sources import find
from dormouse_train.errors import UserError
from pyarrow import parquet

AWKWARD = b"\xef\xbb\xbfa\r\n\rc\xff\xfe\x00\xe2\x80\xa9"
TEXTS = ["one\r\n", "", "zwei \u2029 \ufeff", "three\x00", "\n\n", "fünf"]
CONTENT = "".join(TEXTS).encode()

zstd = unpack._zstd(Path("test.zst"))


def opened(run: Path, *paths: Path | str, val: tuple[Path | str, ...] = (), text_field: str = "text") -> Corpus:
    run.mkdir(exist_ok=True)
    section = DataSection(paths=tuple(map(str, paths)), val=tuple(map(str, val)), text_field=text_field)
    return open_corpus(section, run)


def content(view: ByteView) -> bytes:
    return view.read(0, len(view)).tobytes()


def documents(view: ByteView) -> list[bytes]:
    ends = [*view.documents[1:], len(view)]
    return [view.read(int(a), int(b - a)).tobytes() for a, b in zip(view.documents, ends, strict=True)]


def lines(rows: list[object]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def write(path: Path, texts: list[str], field: str = "text") -> Path:
    """`texts` as rows of what the name of `path` says, each with an empty document that is null before it."""
    rows: list[object] = [{"id": n, field: text} for text in texts for n, text in enumerate((None, text))]
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=4)
    elif path.suffix == ".zst":
        path.write_bytes(zstd.compress(lines(rows)))
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines(rows)))
    else:
        path.write_bytes(lines(rows))
    return path


def test_a_zstd_file_is_the_bytes_that_its_frames_unpack_to(tmp_path: Path):
    file = tmp_path / "awkward.txt.zst"
    file.write_bytes(zstd.compress(AWKWARD[:5]) + zstd.compress(AWKWARD[5:]))
    data = opened(tmp_path / "run", file)
    assert content(data.train) + content(data.heldout) == AWKWARD


@pytest.mark.parametrize("damage", [lambda whole: whole[:-9], lambda whole: b"not zstd", lambda whole: whole[:20] * 2])
def test_a_damaged_zstd_file_is_refused_by_name(tmp_path: Path, damage):
    file = tmp_path / "books.zst"
    file.write_bytes(damage(zstd.compress(np.random.default_rng(0).bytes(1000))))
    with pytest.raises(UserError, match=r"books.zst is not a whole zstd file"):
        opened(tmp_path / "run", file)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_the_text_of_rows_is_trained_on_and_every_row_is_a_document(tmp_path: Path, name: str):
    data = opened(tmp_path / "run", write(tmp_path / name, TEXTS), val=(write(tmp_path / "val.jsonl", ["val"]),))
    assert content(data.train) == CONTENT
    assert documents(data.train) == [text.encode() for text in TEXTS if text]
    assert documents(data.heldout) == [b"val"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_the_field_of_the_text_can_be_another(tmp_path: Path, name: str):
    path = write(tmp_path / name, TEXTS, field="content")
    data = opened(tmp_path / "run", path, text_field="content")
    assert content(data.train) + content(data.heldout) == CONTENT
    again = opened(tmp_path / "run", path)
    assert content(again.train) == content(data.train)
    with pytest.raises(UserError, match=r"no (field|column) 'text'; set data.text_field .*'id', 'content'"):
        opened(tmp_path / "other", path)


def test_a_parquet_column_of_binary_is_taken_as_it_is(tmp_path: Path):
    parquet.write_table(pyarrow.table({"text": pyarrow.array([AWKWARD, AWKWARD[::-1]])}), tmp_path / "a.parquet")
    data = opened(tmp_path / "run", tmp_path / "a.parquet")
    assert content(data.train) + content(data.heldout) == AWKWARD + AWKWARD[::-1]


@pytest.mark.parametrize("text", [b'"a\xff\xc3b"', b'"\xe2\x80\xa8 \x85"'])
def test_bytes_of_a_json_line_that_are_no_utf8_or_end_a_line_elsewhere_stay(tmp_path: Path, text: bytes):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": ' + text + b"}\r\n\r\n" + b'{"text": "end"}')
    view = open_paths([str(tmp_path / "a.jsonl")], tmp_path / "scratch")
    assert documents(view) == [text.strip(b'"'), b"end"]


def test_a_lone_surrogate_escape_is_three_bytes(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a\\ud83d b"}\n')
    view = open_paths([str(tmp_path / "a.jsonl")], tmp_path / "scratch")
    assert content(view) == b"a\xed\xa0\xbd b"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", "line 2 of .* is not JSON"),
        (b"[1]", "line 2 of .* is no JSON object"),
        (b'{"text": 7}', "'text' of line 2 of .* is no text but 7"),
        (b'{"body": "b"}', r"line 2 of .* has no field 'text'; set data.text_field .*'body'"),
        (b'{"text": "long"}' + b" " * 300, "line 2 of .* is longer than 256 bytes"),
    ],
)
def test_a_line_without_a_text_is_refused_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line, says: str):
    monkeypatch.setattr("dormouse_train.data.rows.LINE_LIMIT", 256)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(UserError, match=says):
        opened(tmp_path / "run", tmp_path / "a.jsonl")


@pytest.mark.parametrize("damage", [lambda whole: whole[:-9], lambda whole: b"not parquet", lambda w: w[:4] + w[40:]])
def test_a_damaged_parquet_file_is_refused_by_name(tmp_path: Path, damage):
    path = write(tmp_path / "a.parquet", TEXTS)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=r"a.parquet"):
        opened(tmp_path / "run", path)


def test_a_parquet_column_of_numbers_is_refused(tmp_path: Path):
    path = write(tmp_path / "a.parquet", TEXTS)
    with pytest.raises(UserError, match=r"column 'id' of .* holds int64, no text"):
        opened(tmp_path / "run", path, text_field="id")


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("a.parquet", "pyarrow"),
        pytest.param(
            "a.jsonl.zst", "backports", marks=pytest.mark.skipif(sys.version_info >= (3, 14), reason="standard library")
        ),
    ],
)
def test_without_the_extra_the_mend_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str):
    path = write(tmp_path / name, TEXTS)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"{module}.* is not installed; .*uv add 'dormouse-train\[data\]'"):
        opened(tmp_path / "run", path)


@pytest.mark.parametrize("pack_below", [0, 1 << 20])
def test_files_and_rows_of_one_corpus_are_documents_on_both_sides(tmp_path: Path, monkeypatch, pack_below: int):
    monkeypatch.setattr(packing, "PACK_BELOW", pack_below)
    monkeypatch.setattr(sources, "CHUNK", 2)
    (tmp_path / "a.txt").write_bytes(b"first file ")
    (tmp_path / "c.txt").write_bytes(b"last file")
    write(tmp_path / "b.jsonl", ["x" * 100, "y" * 7, "z"])
    data = opened(tmp_path / "run", tmp_path / "a.txt", tmp_path / "b.jsonl", tmp_path / "c.txt")
    assert documents(data.train) == [b"first file ", b"x" * 100, b"y" * 7, b"z", b"las"]
    assert documents(data.heldout) == [b"t file"]
    assert data.train.documents_in(100, 30).tolist() == [11, 18, 19]


def test_a_document_that_the_split_cuts_begins_on_both_sides(tmp_path: Path):
    write(tmp_path / "a.jsonl", ["a" * 90, "b" * 110])
    data = opened(tmp_path / "run", tmp_path / "a.jsonl")
    assert documents(data.train) == [b"a" * 90, b"b" * 100]
    assert documents(data.heldout) == [b"b" * 10]


def test_files_without_rows_are_a_document_each_and_need_no_index(tmp_path: Path):
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * 10)
    data = opened(tmp_path / "run", *(tmp_path / name for name in "abc"))
    assert documents(data.train) == [b"a" * 10, b"b" * 10, b"c" * 8]
    assert sorted(path.name for path in (tmp_path / "run" / "data").iterdir()) == ["heldout.bin", "train.bin"]


def test_a_lost_index_is_written_again(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", TEXTS)
    before = documents(opened(tmp_path / "run", path).train)
    (tmp_path / "run" / "data" / "train.documents").unlink()
    assert documents(opened(tmp_path / "run", path).train) == before


def test_bytes_held_out_by_name_are_all_of_those_and_the_rest_is_trained_on_whole(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"train on this")
    (tmp_path / "b").write_bytes(b"score this")
    data = opened(tmp_path / "run", tmp_path / "a", val=(tmp_path / "b",))
    assert (content(data.train), content(data.heldout)) == (b"train on this", b"score this")


@pytest.mark.parametrize("val", ["a", "copy", "empty.gz"])
def test_bytes_to_hold_out_that_are_trained_on_or_none_are_refused(tmp_path: Path, val: str):
    for name in ("a", "copy"):
        (tmp_path / name).write_bytes(b"the same")
    (tmp_path / "empty.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(UserError, match=r"trained on; give it on one side|--val holds fewer than 2 bytes"):
        opened(tmp_path / "run", tmp_path / "a", val=(tmp_path / val,))


def enwik8(folder: Path, nbytes: int = manifest.ENWIK8_BYTES) -> Path:
    """A file of that name and size; its bytes are zeros, but for one on each side of each border of the split."""
    with (folder / "enwik8").open("wb") as file:
        file.truncate(nbytes)
        for at, mark in ((89_999_999, b"a"), (90_000_000, b"b"), (94_999_999, b"c"), (95_000_000, b"d")):
            file.seek(at)
            file.write(mark)
    return folder / "enwik8"


def test_enwik8_has_its_usual_split(tmp_path: Path):
    data = opened(tmp_path / "run", enwik8(tmp_path))
    views = data.train, data.heldout, data.test
    assert [len(view) for view in views] == [90_000_000, 5_000_000, 5_000_000]
    edges = [view.read(at, 1).tobytes() for view in views for at in (0, len(view) - 1)]
    assert edges == [b"\0", b"a", b"b", b"c", b"d", b"\0"]
    assert data.manifest()["files"][0]["test_bytes"] == 5_000_000
    assert not (tmp_path / "run" / "data").exists()


def test_a_run_of_enwik8_is_shown_and_scored_with_its_test_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    dormouse_train.train(
        Path(__file__).with_name("tiny.toml"),
        run=tmp_path / "run",
        overrides={"data.paths": [str(enwik8(tmp_path))], "train.steps": 1, "eval.final_window_bytes": 500},
        sets=["eval.sample_bytes=0"],
    )
    info.command(tmp_path / "run")
    assert "90,000,000 bytes to train on, 5,000,000 held out, 5,000,000 for a test" in capsys.readouterr().out
    evaluate.command(tmp_path / "run", [], 700, test=True)
    assert f"BPB over 700 bytes (test part of {tmp_path}/enwik8)" in capsys.readouterr().out


def test_what_is_not_whole_enwik8_is_split_like_any_file(tmp_path: Path):
    data = opened(tmp_path / "run", enwik8(tmp_path, 100_000_001))
    assert [len(view) for view in (data.train, data.heldout, data.test)] == [95_000_001, 5_000_000, 0]


def test_rows_and_synthetic_sources_keep_their_place_among_paths(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"file")
    names = [source.name for source in find([str(tmp_path / "a"), "markov:2:7:100", str(tmp_path / "a")])]
    assert names == [str(tmp_path / "a"), "markov:2:7:100"]
