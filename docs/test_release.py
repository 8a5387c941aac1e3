"""The two decisions of the `release` session that can be wrong: refused ranges, and the cut of the changelog."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def noxfile():
    spec = importlib.util.spec_from_file_location("noxfile", Path(__file__).parents[1] / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_present_version_is_refused_by_no_sibling_and_the_next_major_by_all(noxfile):
    version = noxfile.project("dormouse-kernels")["version"]
    assert noxfile.refusing("dormouse-kernels", version) == []
    dependants = ("dormouse-quant", "dormouse-model", "dormouse-train", "dormouse-bench")
    refused = noxfile.refusing("dormouse-kernels", "99.0.0")
    assert [line.split()[0] for line in refused] == list(dependants)


def test_a_release_takes_what_stood_under_unreleased(noxfile):
    text = "# Changelog\n\n## Unreleased\n\n- Faster.\n\n## 0.1.0\n\n- First.\n"
    assert noxfile.released(text, "0.2.0", "2031-01-02") == (
        "# Changelog\n\n## Unreleased\n\n## 0.2.0 (2031-01-02)\n\n- Faster.\n\n## 0.1.0\n\n- First.\n"
    )


@pytest.mark.parametrize(
    "text", ["# Changelog\n\n## Unreleased\n\n## 0.1.0\n\n- First.\n", "# Changelog\n\n## 0.1.0\n"]
)
def test_a_release_without_news_is_refused(noxfile, text):
    with pytest.raises(ValueError, match="nothing under"):
        noxfile.released(text, "0.2.0", "2031-01-02")
