"""Rows, their verdicts, the table, and the error that is compared with a bound."""

import math
from typing import Any

import pytest
import torch
from dormouse_kernels.aot import Compiled
from dormouse_kernels.proof import CompilerRow, ParityRow, relative_errors, surrounded
from dormouse_kernels.proof.rows import COMPILER_COLUMNS, PARITY_COLUMNS, table


def parity_row(errors, bound=1e-2):
    return ParityRow("op", "T 3", "float32", "gpu", bound, errors)


@pytest.mark.parametrize(
    ("errors", "verdict"),
    [
        ({"out": 1e-3, "dV": 1e-2}, "ok"),
        ({"out": 1e-3, "dV": 1.1e-2}, "FAIL dV"),
        ({"out": math.nan, "dV": math.inf}, "FAIL out, dV"),
        (None, "not run"),
    ],
)
def test_a_parity_row_judges_every_tensor(errors, verdict):
    assert parity_row(errors).verdict == verdict


def test_a_parity_row_shows_every_tensor_and_its_bound():
    assert parity_row({"out": 2e-3, "dV": 0.0}).cells() == (
        "op", "T 3", "float32", "gpu", "out 2.0e-03 dV 0.0e+00", "1e-02", "ok",
    )  # fmt: skip
    assert parity_row(None).cells()[4:] == ("-", "1e-02", "not run")


def compiled(**changes):
    costs: dict[str, Any] = {"shared": 98_304, "registers": 86, "spills": 0, "loads": {4: 3, 16: 6}, "stores": {16: 8}}
    return Compiled("pack.kernels.glu", 120, **{**costs, **changes})


@pytest.mark.parametrize(
    ("changes", "over"),
    [
        ({}, {}),
        ({"shared": 101_377}, {"shared": "101377 > 101376"}),
        ({"spills": 16}, {"spills": "16 > 0"}),
        ({"loads": {2: 32}, "stores": {1: 1}, "async_copies": {4: 9}}, {"narrow accesses": "33 > 0"}),
    ],
)
def test_a_compiler_row_is_held_to_shared_memory_spills_and_narrow_accesses(changes, over):
    row = CompilerRow(compiled(**changes), "64×128×32", 101_376)
    assert row.over == over
    assert row.cells()[-1] == ("ok" if not over else "FAIL " + "".join(f"{k} {v}" for k, v in over.items()))


def test_a_compiler_row_shows_what_was_read_off_the_cubin():
    row = CompilerRow(compiled(async_copies={16: 18}), "64×128×32", 101_376, narrow_limit=4)
    assert row.cells() == (
        "glu", "64×128×32", "sm_120", "98304", "86", "0", "ld 3×4B 6×16B; st 8×16B; cp 18×16B",
        "101376 B, 0 spilled, 4 narrow", "ok",
    )  # fmt: skip
    assert len(row.cells()) == len(COMPILER_COLUMNS)


def test_a_table_pads_every_column_to_its_widest_cell():
    lines = table(("op", "shape"), [("glu_experts", "T 1"), ("x", "a longer shape")])
    assert lines == [
        "op           shape",
        "-----------  --------------",
        "glu_experts  T 1",
        "x            a longer shape",
    ]
    assert table(PARITY_COLUMNS, [])[0].split("  ")[0] == "op"


def test_the_error_is_relative_to_the_norm_of_the_oracle():
    want = {"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2), "empty": torch.zeros(0, 3)}
    got = {"a": torch.tensor([3.0, 4.5]), "b": torch.zeros(2), "empty": torch.zeros(0, 3)}
    assert relative_errors(got, want) == {"a": pytest.approx(0.1), "b": 0.0, "empty": 0.0}


@pytest.mark.parametrize("wrong", [1e-30, math.nan, math.inf])
def test_a_zero_that_is_not_one_is_infinitely_wrong(wrong):
    got = torch.tensor([0.0, wrong], dtype=torch.float64)
    assert relative_errors({"a": got}, {"a": torch.zeros(2)}) == {"a": math.inf}


def test_one_wrong_expert_among_many_shows_when_judged_by_expert():
    want = torch.randn(1000, 4, generator=torch.Generator().manual_seed(0))
    got = want.clone()
    got[17] *= 2
    assert relative_errors({"dV": got}, {"dV": want})["dV"] < 0.1
    assert relative_errors({"dV": got}, {"dV": want}, by_expert=("dV",))["dV"] == pytest.approx(1.0)


def test_errors_of_other_names_or_shapes_are_refused():
    one = torch.zeros(1)
    with pytest.raises(ValueError, match=r"got \['a'\] but want \['b'\]"):
        relative_errors({"a": one}, {"b": one})
    with pytest.raises(ValueError, match=r"a is \[1\], wanted \[2\]"):
        relative_errors({"a": one}, {"a": torch.zeros(2)})


def test_a_surrounded_tensor_is_the_same_with_nan_on_both_sides():
    x = torch.arange(6.0).view(2, 3).mT
    inside = surrounded(x, margin=16)
    assert torch.equal(inside, x)
    assert inside.is_contiguous()
    around = torch.as_strided(inside, (38,), (1,), 0)
    assert around.isnan().tolist() == [True] * 16 + [False] * 6 + [True] * 16


def test_integers_and_odd_margins_cannot_surround():
    with pytest.raises(TypeError, match=r"tensor is torch.int64; pass floats"):
        surrounded(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="margin is 8; pass a multiple of 16"):
        surrounded(torch.zeros(2), margin=8)
