"""Runs the Python blocks of the README files and of these pages; a failure names the page and its line."""

from __future__ import annotations

import traceback

import pytest
from pages import PAGES, ROOT, python_of

WITH_PYTHON = [path for path in PAGES if python_of(path.read_text()).strip()]


@pytest.mark.parametrize("path", WITH_PYTHON, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_blocks_of_a_page_run_in_order(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(python_of(path.read_text()), str(path), "exec"), {"__name__": "__main__"})


def test_a_failing_block_is_reported_at_the_line_of_its_page():
    page = "# Title\n\n```python\nx = 1\n```\n\n```console\n$ raise\n```\n\n```python\nassert x == 2\n```\n"
    with pytest.raises(AssertionError) as failure:
        exec(compile(python_of(page), "page.md", "exec"), {})
    assert traceback.extract_tb(failure.value.__traceback__)[-1].lineno == 12


def test_every_public_package_has_a_page_that_runs():
    names = {str(path.relative_to(ROOT)) for path in WITH_PYTHON}
    assert {f"docs/{page}.md" for page in ("kernels", "quant", "model", "train")} <= names
