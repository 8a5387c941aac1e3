"""`bench moe` and `bench predict` as typed."""

from __future__ import annotations

import pytest
import torch
from dormouse_bench import ceilings, cli
from dormouse_bench.ceilings import copy, gemm
from dormouse_bench.moe import command, forecast, measure, picture, predict
from dormouse_bench.moe.cards import H200, RTX_5060_TI
from dormouse_bench.moe.costs import Rates
from dormouse_bench.moe.shapes import B1, SHAPES
from dormouse_bench.rows import Row, read, write
from dormouse_kernels.aot import Compiled
from typer.testing import CliRunner


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch):
    """Ceilings of sizes that a test can wait for."""

    def measured(device, rounds, origin):
        return [copy(4, device, 1, origin), gemm(64, torch.float32, device, 1, origin)]

    monkeypatch.setattr(ceilings, "ceilings", measured)


def run(*arguments):
    return CliRunner().invoke(cli.app, ["moe", "--device", "cpu", "--ms", "1", *arguments])


def row(**changes):
    values = {
        "bench": "moe", "shape": "b1", "phase": "fwd", "implementation": "triton", "ms": 0.5, "floor_ms": 0.35,
        "peak_extra_bytes": 0, "machine": "NVIDIA H200", "torch": "2", "triton": "3", "commit": "unknown",
        "date": "2031-01-02",
    }  # fmt: skip
    return Row.model_validate(values | changes)


def ceilings_of(machine):
    return [
        row(bench="ceilings", shape="1024mib", phase="copy", implementation="torch", ms=0.5, machine=machine),
        row(bench="ceilings", shape="8192-bfloat16", phase="gemm", implementation="torch", ms=1.5, machine=machine),
    ]


def test_a_run_prints_a_table_and_keeps_rows_with_floors_a_page_and_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    out, page, drawn = (tmp_path / name for name in ("rows.json", "page.md", "picture.png"))
    done = run("--shape", "tiny,tiny-glu", "--arms", "reference,torch-bmm-c48,torch-bmm",
               "--out", str(out), "--markdown", str(page), "--picture", str(drawn))  # fmt: skip
    assert done.exit_code == 0, done.output
    rows = read(out)
    assert [each.phase for each in rows if each.bench == "ceilings"] == ["copy", "gemm"]
    ours = [each for each in rows if each.bench == "moe"]
    assert {(each.shape, each.implementation) for each in ours} == {
        ("tiny", "reference"), ("tiny", "torch-bmm-c48"), ("tiny-glu", "reference"), ("tiny-glu", "torch-bmm"),
    }  # fmt: skip
    assert all(each.floor_ms is not None and each.floor_ms < each.ms for each in ours)
    assert page.read_text().startswith("| shape | phase | implementation | ms |")
    assert page.read_text().splitlines()[2] in done.output
    assert "uniform routing" in page.read_text()
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_a_disagreement_is_an_error_after_the_table(monkeypatch):
    monkeypatch.setitem(measure.ROUNDING, torch.float32, -1.0)
    done = run("--shape", "tiny", "--arms", "torch-bmm-c48")
    assert done.exit_code == 1
    assert "| tiny | fwd | torch-bmm-c48 |" in done.output
    assert done.stderr.strip().splitlines() == [
        line.split("; ")[0] for line in done.output.splitlines() if line.endswith("; its times are not compared")
    ]


def test_bad_options_are_one_sentence(tmp_path):
    known = ", ".join(SHAPES)
    assert run("--shape", "b2").stderr == f"bench moe: --shape has 'b2'; choose from {known}\n"
    unknown = run("--shape", "tiny", "--arms", "triton,tritn").stderr
    assert unknown.startswith("bench moe: --arms has 'tritn'; choose from triton, reference, padded-c8, torch-bmm-c8, ")
    assert run("--commit", "main").stderr.startswith("--commit is 'main'; pass the commit's first twelve")
    missing = run("--shape", "tiny", "--trained", str(tmp_path / "no.pt"))
    assert (missing.exit_code, missing.stderr.count("\n")) == (2, 1)
    untrained = run("--shape", "b1-trained")
    assert untrained.stderr == "indices: routing is 'trained' but no indices are given; pass --trained FILE\n"


def test_a_picture_without_matplotlib_is_refused_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(picture.importlib.util, "find_spec", lambda name: None)
    done = run("--shape", "tiny", "--picture", str(tmp_path / "x.png"))
    assert (done.exit_code, done.output) == (2, done.stderr)
    assert "run with `uv run --group picture`" in done.stderr


def test_rates_are_read_back_from_the_kept_ceilings():
    rates = command.rates_of(ceilings_of("here"))
    assert rates.bytes_per_second == pytest.approx(2 * 2**30 / 0.5e-3)
    assert rates.flops_per_second == pytest.approx(2 * 8192**3 / 1.5e-3)
    with pytest.raises(ValueError, match="hold no ceilings"):
        command.rates_of([row()])


def test_a_multiprocessor_holds_what_its_tightest_limit_allows():
    assert RTX_5060_TI.resident(registers=32, shared=0, num_warps=4) == 12  # 48 warps
    assert RTX_5060_TI.resident(registers=162, shared=26624, num_warps=4) == 3  # both registers and shared memory
    assert RTX_5060_TI.resident(registers=131, shared=98304, num_warps=8) == 1
    assert RTX_5060_TI.resident(registers=16, shared=0, num_warps=1) == 24
    assert H200.resident(registers=128, shared=73728, num_warps=4) == 3
    # 1 KiB a block is the driver's: three blocks of 228 / 3 - 1 KiB fit, a byte more does not
    assert H200.resident(registers=32, shared=76800, num_warps=4) == 3
    assert H200.resident(registers=32, shared=76801, num_warps=4) == 2


@pytest.fixture
def uncompiled(monkeypatch):
    """Kernels as if compiled: 128 registers and 49,152 bytes each, of which an H200's multiprocessor holds four."""
    monkeypatch.setattr(
        predict, "compile_kernels", lambda builds: [Compiled("", each.arch, 49152, 128, 0) for each in builds]
    )


def test_a_prediction_names_every_launch_of_both_phases(uncompiled):
    launched = predict.predict(B1, H200, Rates(4.27e12, 7e14))
    names = [(each.launch.name, each.launch.phase) for each in launched]
    assert names == [
        ("count_blocks", "fwd"), ("scan_bins", "fwd"), ("place_slots", "fwd"), ("latent_rows", "fwd"),
        ("expand_rows", "fwd"), ("grad_v_rows", "bwd"), ("long_grad_v", "bwd"),
        ("grad_u_rows", "bwd"), ("long_grad_u", "bwd"), ("sum_slots", "bwd"),
    ]  # fmt: skip
    latent = launched[3]
    assert latent.resident == 4
    assert latent.waves == pytest.approx(1024 / (132 * 4))
    # 683.7 MB at 4.27 TB/s, and half of the idle share of the second wave of 1.94
    moved = latent.cost.bytes / 4.27e12 * 1e3
    assert latent.ms == pytest.approx(0.006 + moved * (1 + (2 - latent.waves) / latent.waves / 2))
    assert predict.total_ms(launched, "fwd+bwd") == pytest.approx(sum(each.ms for each in launched))


def test_predict_holds_itself_against_results_and_marks_what_is_predicted(uncompiled, tmp_path):
    write(tmp_path / "rows.json", [*ceilings_of("NVIDIA H200"), row(), row(phase="fwd+bwd", ms=1.4)])
    done = CliRunner().invoke(cli.app, ["predict", str(tmp_path / "rows.json"), "--launches"])
    assert done.exit_code == 0, done.output
    lines = [line for line in done.output.splitlines() if ": predicted " in line]
    assert [line.split(": predicted")[0] for line in lines] == [
        f"{card}: b1 {phase}" for card in ("NVIDIA H200", "GeForce RTX 5060 Ti") for phase in forecast.PHASES
    ]
    assert ["measured" in line for line in lines] == [True, False, True, False, False, False]
    assert "| expand_rows | fwd | 1256.8 |" in done.output


@pytest.mark.parametrize("machine", ["here", "GeForce RTX 5060 Ti"])
def test_results_of_another_machine_are_refused(tmp_path, machine):
    write(tmp_path / "rows.json", [*ceilings_of(machine), row(machine=machine)])
    done = CliRunner().invoke(cli.app, ["predict", str(tmp_path / "rows.json")])
    assert done.exit_code == 2
    assert done.stderr == f"bench predict: the results are of {machine}; pass results of one of NVIDIA H200\n"


def test_a_pass_whose_launches_are_not_known_is_not_predicted():
    with pytest.raises(ValueError, match="pass b1 or b1-zipf"):
        predict.predict(SHAPES["qwen3"], H200, Rates(1.0, 1.0))
