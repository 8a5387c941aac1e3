"""The `bench` command."""

from __future__ import annotations

import subprocess
import sys

import pytest
from dormouse_bench import cli, experts
from dormouse_bench.ceilings import copy, gemm
from dormouse_bench.experts import Shape
from dormouse_bench.rows import Origin, read
from typer.testing import CliRunner

HERE = Origin.model_validate(
    {"machine": "here", "torch": "2", "triton": "3", "commit": "unknown", "date": "2031-01-02"}
)


@pytest.fixture
def run(monkeypatch):
    small = Shape(tokens=11, d=48, r=16, f=37, experts=5, k=2)
    monkeypatch.setattr(experts, "shapes", lambda: {"nano": small, "b1": small})
    return lambda *arguments: CliRunner().invoke(cli.app, list(arguments))


def test_help_loads_nothing_heavy():
    code = "import sys; from dormouse_bench.cli import app\ntry: app(['--help'])\nexcept SystemExit: pass\n"
    code += "sys.exit(int('torch' in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_command_runs_as_a_module_where_no_script_is_installed():
    command = [sys.executable, "-m", "dormouse_bench", "moe", "--help"]
    assert "--commit" in subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_experts_prints_both_ratios_and_keeps_its_rows(run, tmp_path):
    done = run("experts", "--device", "cpu", "--rounds", "1", "--out", str(tmp_path / "rows.json"))
    assert done.exit_code == 0, done.output
    for phase in ("fwd", "fwd+bwd"):
        assert f"\n{phase}: reference takes " in done.output
    assert len(read(tmp_path / "rows.json")) == 4


def test_experts_gives_no_ratio_when_the_arms_disagree(run, monkeypatch, tmp_path):
    monkeypatch.setitem(experts.ROUNDING, experts.torch.float32, -1.0)
    done = run("experts", "--device", "cpu", "--rounds", "1", "--out", str(tmp_path / "rows.json"))
    assert done.exit_code == 1
    assert "are not compared" in done.stderr
    assert "takes" not in done.output
    assert not (tmp_path / "rows.json").exists()


def test_an_unknown_shape_is_one_sentence(run):
    done = run("experts", "--shape", "b2")
    assert (done.exit_code, done.stderr) == (2, "bench experts: --shape is 'b2'; choose nano or b1\n")


def test_a_missing_device_is_one_sentence(run):
    if experts.torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    done = run("ceilings", "--device", "cuda")
    assert done.exit_code == 2
    assert done.stderr == "bench: --device cuda, but torch sees no CUDA device here; pass --device cpu\n"


def test_ceilings_are_rates_of_what_their_rows_say():
    rate = copy(16, "cpu", 1, HERE)
    assert rate.rate == pytest.approx(2 * 16 * 2**20 / (rate.row.ms / 1e3) / 1e9)
    assert (rate.row.shape, rate.row.phase) == ("16mib", "copy")
    product = gemm(64, experts.torch.float32, "cpu", 1, HERE)
    assert product.rate == pytest.approx(2 * 64**3 / (product.row.ms / 1e3) / 1e12)
    assert (product.row.shape, product.row.phase) == ("64-float32", "gemm")


def test_show_prints_kept_rows_and_refuses_other_files(run, tmp_path):
    run("experts", "--device", "cpu", "--rounds", "1", "--out", str(tmp_path / "rows.json"))
    shown = run("show", str(tmp_path / "rows.json"))
    assert shown.exit_code == 0
    assert shown.output.count("padded") == 2
    (tmp_path / "rows.json").write_text("{}")
    refused = run("show", str(tmp_path / "rows.json"))
    assert refused.exit_code == 2
    assert "is not a results file" in refused.stderr
