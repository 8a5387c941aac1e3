"""The plugin: tables at the end, `not run` without a GPU, and exit codes that can be relied on."""

import pytest
import torch
import triton  # noqa: F401  pytester forgets what was first imported inside it, and triton cannot be imported twice

pytest_plugins = "pytester"

PARITY = """
import torch
import pytest

@pytest.mark.parametrize("level", ["reference", "interpreter", "gpu"])
def test_planted(proof, level):
    proof.parity(
        "planted_op", "T 3", torch.float32, level, bound=1e-3, kernels=("pack.k",), measure=lambda device: {errors}
    )
"""

COMPILED = """
from dormouse_kernels.aot import Compiled
import pytest

@pytest.mark.parametrize("arch", {archs})
def test_planted(proof, arch):
    proof.compiled(Compiled("pack.k", arch, {shared}, 40, 0), "16×16×16", kernels=("pack.k",))
"""

KERNEL = "import triton\n@triton.jit\ndef k(): ...\n"


@pytest.fixture
def session(pytester, monkeypatch):
    """Runs planted tests under the plugin in a tree with one planted kernel, `pack.k`."""
    # as on a machine without a GPU whose kernels are interpreted
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytester.mkdir("src").joinpath("pack.py").write_text(KERNEL)

    def run(*options, errors='{"out": 1e-4}', shared=98_304, archs=(120, 90), parity=True, compiled=True):
        if parity:
            pytester.makepyfile(test_parity=PARITY.format(errors=errors))
        if compiled:
            pytester.makepyfile(test_sm120=COMPILED.format(shared=shared, archs=list(archs)))
        return pytester.runpytest_inprocess("-p", "dormouse_kernels.proof", "-p", "no:cacheprovider", *options)

    return run


def test_without_a_gpu_both_tables_are_printed_and_the_session_passes(session):
    result = session("--proof-src", "src")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(
        [
            "*= parity =*",
            "op * shape * dtype * level * worst relative error by tensor * bound * verdict",
            "planted_op  T 3 * float32  reference * out 1.0e-04 * 1e-03 * ok",
            "planted_op  T 3 * float32  interpreter * out 1.0e-04 * 1e-03 * ok",
            "planted_op  T 3 * float32  gpu * - * 1e-03 * not run",
            "*= sm120 =*",
            "kernel * tile * arch * shared * registers * spills * access widths * limit * verdict",
            "k * 16×16×16  sm_120 * 98304 * 40 * 0 * - * 101376 B, 0 spilled, 0 narrow * ok",
            "k * 16×16×16  sm_90 * 232448 B*ok",
        ]
    )


def test_with_gpu_required_a_gpu_row_that_did_not_run_fails(session):
    result = session("--gpu-required", "--proof-src", "src")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(["*planted_op on level gpu was not run: there is no CUDA device*"])


def test_with_gpu_required_a_session_without_gpu_rows_fails(session):
    result = session("--gpu-required", parity=False)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["FAILED: --gpu-required was given but no test made a GPU row*"])
    assert session("--gpu-required", "--proof-table", "sm120", parity=False).ret == pytest.ExitCode.OK


def test_an_error_over_the_bound_fails_and_names_the_tensor(session):
    result = session(errors='{"out": 1e-4, "dV": 0.5}')
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*over the bound 0.001: dV 5.000e-01*", "*out 1.0e-04 dV 5.0e-01*FAIL dV"])


def test_a_nan_fails(session):
    assert session(errors='{"out": float("nan")}').ret == pytest.ExitCode.TESTS_FAILED


def test_a_tile_over_the_shared_memory_of_one_card_fails_for_that_card_only(session):
    result = session(shared=147_456)
    result.assert_outcomes(passed=3, skipped=1, failed=1)
    result.stdout.fnmatch_lines(["*sm_120*FAIL shared 147456 > 101376", "*sm_90*147456*ok"])


def test_a_kernel_that_a_table_misses_fails_the_session(session):
    result = session("--proof-src", "src", archs=(120,))
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=3, skipped=1)
    result.stdout.fnmatch_lines(["FAILED: pack.k has no row for sm_90 in the sm120 table; add a test that proves it"])


def test_a_table_that_the_session_is_not_to_fill_is_not_missed(session):
    assert session("--proof-src", "src", compiled=False).ret == pytest.ExitCode.TESTS_FAILED
    assert session("--proof-src", "src", "--proof-table", "parity", compiled=False).ret == pytest.ExitCode.OK


def test_a_mistyped_source_tree_is_no_empty_one(session):
    result = session("--proof-src", "scr")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*there is no Python file under scr; pass a source tree*"])


def test_where_kernels_are_compiled_the_interpreters_rows_come_from_another_process_and_are_held_to_the_bound(
    session, monkeypatch
):
    monkeypatch.delenv("TRITON_INTERPRET")
    by_process = '{"interpreted": 1.0} if __import__("os").environ.get("TRITON_INTERPRET") else {"compiled": 1e-4}'
    result = session(errors=by_process, compiled=False)
    result.assert_outcomes(passed=1, failed=1, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "planted_op * reference * compiled 1.0e-04 * ok",
            "planted_op * interpreter * interpreted 1.0e+00 * FAIL interpreted",
        ]
    )
