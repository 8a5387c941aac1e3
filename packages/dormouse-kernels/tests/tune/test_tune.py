"""The tuner without a GPU: what it tries, that no failure ends it, what it prints and writes."""

import os
import sys
from dataclasses import replace

import pytest
import torch
from dormouse_kernels import tiles
from dormouse_kernels.aot import Build, Pointer
from dormouse_kernels.moe.grouped.tiles import SM_120 as GROUPED
from dormouse_kernels.moe.latent.tiles import INTERPRETED, SM_120
from dormouse_kernels.tune.__main__ import main
from dormouse_kernels.tune.candidates import Candidate, compile_all, time_all
from dormouse_kernels.tune.grid import TABLE, grid
from dormouse_kernels.tune.problem import Problem, builds, call

SMALL = Problem("latent_glu_experts", T=9, d=16, r=16, f=5, experts=3, k=2, dtype=torch.float32)


def test_the_grid_is_the_row_and_one_change_at_a_time():
    latent = grid(SM_120)
    assert next(iter(latent.items())) == (TABLE, SM_120)
    assert latent["expand_f=64"] == replace(SM_120, expand_f=64)
    assert latent["turns=False"] == replace(SM_120, turns=False)
    assert latent["grad_v_pieces=2"] == replace(SM_120, grad_v_pieces=2)
    assert not any(name.startswith(("pdl", "long_programs")) for name in latent)
    grouped = grid(GROUPED, "up.")
    assert "up.persistent=1" in grouped
    assert not any("persistent" in name for name in grid(GROUPED, "grad_"))
    assert grouped["up.rows=64"] == replace(GROUPED, up=replace(GROUPED.up, rows=64))
    assert all(name == TABLE or name.startswith("up.") for name in grouped)
    assert len(set(grouped.values())) == len(grouped) > 5


def test_the_launches_of_both_ops_are_found_without_a_device():
    latent = builds(replace(SMALL, dtype=torch.bfloat16), SM_120, 120)
    names = {build.kernel.fn.__name__ for build in latent}
    assert names >= {"latent_rows", "expand_rows", "grad_v_rows", "long_grad_v", "grad_u_rows", "long_grad_u"}
    grouped = builds(replace(SMALL, op="glu_experts", dtype=torch.bfloat16), GROUPED, 120)
    names = {build.kernel.fn.__name__ for build in grouped}
    assert names >= {"gated_rows", "multiply_rows", "gate_gradients", "bank_gradients"}
    assert {build.num_warps for build in grouped if build.kernel.fn.__name__ == "gated_rows"} == {GROUPED.up.warps}


def matmul(planted, sizes):
    """One product with `latent_d` columns of depth a tile, or one whose tiles are too large for the card."""
    pointer = Pointer(torch.bfloat16)
    large = {"M": 4096, "N": 4096, "K": 2048, "stride_a": 2048, "stride_b": 4096, "stride_c": 4096}
    side = {"BM": 128, "BN": 256} if sizes.rows > 64 else {"BM": 16, "BN": 16}
    arguments = {"a": pointer, "b": pointer, "c": pointer, **large, **side, "BK": sizes.latent_d}
    return [Build(planted.matmul, arguments, 120, num_warps=8, num_stages=4)]


def test_a_candidate_that_cannot_be_built_is_a_row_and_the_next_one_is_still_tried(planted):
    given = {
        "contracts 8": replace(SM_120, latent_d=8),
        "fits": replace(SM_120, latent_d=16),
        "too large": replace(SM_120, rows=128, latent_d=64),
        "fits too": replace(SM_120, latent_d=32),
    }
    made = {each.name: each for each in compile_all(given, lambda sizes: matmul(planted, sizes))}
    assert list(made) == list(given)
    assert "planted.matmul does not compile for sm_120" in made["contracts 8"].failure
    assert made["too large"].failure == "147456 bytes of shared memory, of 101376"
    for name in ("fits", "fits too"):
        assert made[name].failure == ""
        assert made[name].registers > 0
        assert 0 < made[name].occupancy <= 1


def test_after_a_compiler_that_crashes_another_goes_on(planted, tmp_path, monkeypatch):
    """A Python that dies on its first start, as the compiler would inside it."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nif mkdir {tmp_path}/died 2> /dev/null; then kill -SEGV $$; fi\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # one share: with two either build could be the first
    given = {"crashes": replace(SM_120, latent_d=16), "next": replace(SM_120, latent_d=32)}
    crashed, following = compile_all(given, lambda sizes: matmul(planted, sizes))
    assert crashed.failure.startswith("the compiling process left with -11")
    assert following.failure == ""
    assert following.kernels


def test_a_launch_that_fails_or_disagrees_is_a_row_and_the_fastest_of_the_others_wins():
    def run(sizes):
        if sizes.rows == 1:
            raise RuntimeError("CUDA error: out of resources\nmore")
        return [torch.full((4,), float("nan") if sizes.rows == 2 else 1.0)]

    rows = {"table": 64, "breaks": 1, "wrong": 2, "fast": 32}
    times = iter([2.0, 1.0])
    made = time_all(
        [Candidate(name, replace(SM_120, rows=size)) for name, size in rows.items()], run, lambda _: next(times)
    )
    by_name = {each.name: each for each in made}
    assert by_name["breaks"].failure == "CUDA error: out of resources"
    assert by_name["wrong"].failure == "results differ by nan from those of table"
    assert [each.name for each in sorted(made, key=lambda each: each.rank)][:2] == ["fast", "table"]


def test_tiles_are_timed_on_the_op_itself():
    ran = []
    (made,) = time_all(
        [Candidate("row", INTERPRETED)], call(SMALL, torch.device("cpu")), lambda work: ran.append(work()) or 1.0
    )
    assert (made.failure, made.ms) == ("", 1.0)
    assert [len(results) for results in ran] == [6]


def test_compile_only_prints_a_table_and_writes_what_a_call_takes(tmp_path, capsys):
    path = tmp_path / "best.json"
    small = ["--T", "64", "--d", "64", "--r", "32", "--f", "48", "--experts", "8"]
    main(["latent_glu_experts", "--compile-only", "--arch", "120", "--only", "turns", "--json", str(path), *small])
    printed = capsys.readouterr().out
    assert "2 candidates for sm_120" in printed
    assert "(compiled for sm_120, not measured)" in printed
    assert TABLE in printed
    assert "turns=False" in printed
    assert tiles.read(path, "latent_glu_experts") in grid(SM_120).values()
    assert "compiled for sm_120, not measured" in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["glu_experts"], "there is no CUDA device to measure on; pass --compile-only --arch 120"),
        (["glu_experts", "--compile-only"], "needs to know the card; pass --arch, such as 120"),
        (["glu_experts", "--compile-only", "--arch", "75"], "--arch is 75; pass one of 80, 86"),
    ],
)
def test_what_cannot_be_tuned_is_one_sentence_and_exit_code_2(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert message in capsys.readouterr().err
