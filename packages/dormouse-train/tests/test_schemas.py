"""The page that others build on says what the code does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from dormouse_model.config import dotted_keys
from dormouse_train.config import PROGRESS_KEYS, Config, flat, load_config
from dormouse_train.metrics import read

PAGE = (Path(__file__).parents[3] / "docs" / "schemas.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """The cells of the section's table, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_page_lists_every_key_of_the_configuration_and_no_other():
    listed = [key for row in rows("Configuration") for key in re.findall(r"`([a-z]+\.[a-z_]+)`", row[0])]
    assert listed == [key for key in listed if key in dotted_keys(Config)]
    assert sorted(listed) == sorted(dotted_keys(Config))


# What a named configuration sets is not the default; every key that nano does not set is.
@pytest.mark.parametrize("section", ["data", "train", "optim", "eval", "checkpoint", "log"])
def test_the_page_shows_the_default_of_every_key(section: str):
    defaults = Config.model_fields[section].get_default()
    shown = {}
    for keys, default, _ in (row for row in rows("Configuration") if f"`{section}." in row[0]):
        names = re.findall(r"`([a-z]+\.[a-z_]+)`", keys)
        values = json.loads(f"[{default.replace('`', '').replace('none', 'null')}]") if default else []
        shown |= dict(zip(names, values, strict=False))
    for name, value in defaults.model_dump(mode="json").items():
        assert shown[f"{section}.{name}"] == value, name


def test_the_page_lists_the_keys_that_a_resume_may_change():
    sentence = section("Configuration").split("A resume may change")[1]
    assert set(re.findall(r"`([a-z]+\.[a-z_]+)`", sentence)) == PROGRESS_KEYS | {"train.steps"}
    assert set(flat(load_config(None))) >= PROGRESS_KEYS


def test_the_page_lists_every_key_of_a_line_of_metrics(finished):
    listed = set(re.findall(r"`([a-z_]+)`", section("metrics.jsonl")))
    written = {key for line in read(finished[0]) for key in line}
    assert {key for key in written if not key.startswith("counters.")} <= listed
    assert any(key.startswith("counters.") for key in written)


def test_the_page_lists_every_part_and_file_of_a_checkpoint(finished):
    folder = finished[0] / "checkpoints" / "step-6"
    state = json.loads((folder / "state.json").read_text())
    assert list(state) == re.findall(r"^\| `(\w+)` \|", section("Checkpoints"), re.MULTILINE)
    assert all(name in section("Checkpoints") for name in ("state.json", "manifest.json", "<part>.safetensors"))
    progress = next(row[1] for row in rows("Checkpoints") if row[0] == "`progress`")
    assert {name for name in state["progress"] if not name.startswith("counter_")} == set(
        re.findall(r"`(\w+)`", progress)
    )


def test_the_page_lists_every_key_of_the_manifest_of_the_data(finished):
    stored = json.loads((finished[0] / "data.json").read_text())
    words = set(re.findall(r"`([a-z_0-9]+)`", section("The run folder")))
    assert stored.keys() | stored["files"][0].keys() <= words


def test_the_page_lists_every_key_of_the_report(finished):
    stored = json.loads((finished[0] / "report.json").read_text())
    words = set(re.findall(r"`([a-z_0-9]+)`", section("report.json")))
    assert stored.keys() | stored["baselines"].keys() == words
