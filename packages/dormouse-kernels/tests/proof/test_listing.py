"""Every `@triton.jit` is found however it is spelt, and one without its rows is named."""

from pathlib import Path

import dormouse_kernels
import pytest
from dormouse_kernels.aot import Compiled
from dormouse_kernels.proof import CompilerRow, ParityRow, jit_functions, missing

SPELLINGS = {
    "the module": "import triton\n@triton.jit\ndef k(): ...",
    "with arguments": "import triton\n@triton.jit(noinline=True)\ndef k(): ...",
    "another name for the module": "import triton as t\n@t.jit\ndef k(): ...",
    "the name": "from triton import jit\n@jit\ndef k(): ...",
    "another name": "from triton import jit as kernel\n@kernel\ndef k(): ...",
    "a submodule's import": "import triton.language as tl\nimport triton.testing\n@triton.jit\ndef k(): ...",
    "the runtime's": "from triton.runtime.jit import jit\n@jit\ndef k(): ...",
    "the runtime module": "import triton.runtime.jit as tj\n@tj.jit\ndef k(): ...",
    "under autotune": "import triton\n@triton.autotune([], key=[])\n@triton.heuristics({})\n@triton.jit\ndef k(): ...",
    "a call": "import triton\ndef k(): ...\nkernel = triton.jit(k)",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_kernel_is_found_however_it_is_spelt(tmp_path, spelling):
    (tmp_path / "a.py").write_text(SPELLINGS[spelling])
    assert jit_functions(tmp_path) == ["a.k"]


OTHERS = {
    "another decorator": "import triton\n@triton.testing.perf_report\ndef k(): ...",
    "another library's jit": "from numba import jit\n@jit\ndef k(): ...",
    "another module's attribute": "import torch\n@torch.jit\ndef k(): ...",
    "a comment": "import triton\n# @triton.jit\ndef k(): ...",
    "a text": 'import triton\nsource = """@triton.jit\ndef k(): ..."""',
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_no_kernel_is_not_listed(tmp_path, other):
    (tmp_path / "a.py").write_text(OTHERS[other])
    assert jit_functions(tmp_path) == []


def test_names_are_those_that_python_gives(tmp_path):
    (tmp_path / "pack" / "moe").mkdir(parents=True)
    (tmp_path / "pack" / "__init__.py").write_text("import triton\n@triton.jit\ndef top(): ...")
    (tmp_path / "pack" / "moe" / "kernels.py").write_text(
        "import triton\nclass Tiles:\n    @triton.jit\n    def tile(): ...\n"
        "def make():\n    @triton.jit\n    def inner(): ...\n"
    )
    assert jit_functions(tmp_path) == ["pack.moe.kernels.Tiles.tile", "pack.moe.kernels.make.inner", "pack.top"]


def test_a_folder_without_python_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no Python file under"):
        jit_functions(tmp_path / "nowhere")


def parity(level, *kernels):
    return ParityRow("op", "shape", "float32", level, 1.0, None, kernels)


def built(arch, *kernels):
    return CompilerRow(Compiled(kernels[0], arch, 0, 0, 0), "tile", 1, kernels=kernels)


def test_parity_wants_a_row_in_the_interpreter_and_one_on_a_gpu():
    rows = [parity("interpreter", "a.f", "a.g"), parity("gpu", "a.g"), parity("reference", "a.f")]
    assert missing(["a.f", "a.g"], "parity", rows) == [
        "a.f has no row for gpu in the parity table; add a test that proves it"
    ]
    assert missing(["a.g"], "parity", rows) == []


def test_sm120_wants_a_row_for_both_cards():
    rows = [built(120, "a.f"), built(90, "a.g"), built(120, "a.g")]
    assert missing(["a.f", "a.g"], "sm120", rows) == [
        "a.f has no row for sm_90 in the sm120 table; add a test that proves it"
    ]


def test_a_kernel_without_any_row_misses_all_of_them():
    assert len(missing(["a.f"], "parity", [])) == 2
    assert len(missing(["a.f"], "sm120", [])) == 2


def test_the_kernels_of_this_package_are_listed():
    assert "dormouse_kernels.offsets.row_offset" in jit_functions(Path(dormouse_kernels.__file__).parents[1])
