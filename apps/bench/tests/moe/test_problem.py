"""Problems are the same for a seed, and their routing is of the kind that their shape says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dormouse_bench.moe import problem
from dormouse_bench.moe.problem import indices, make, read_indices
from dormouse_bench.moe.shapes import DEFAULTS, SHAPES, TINY

WIDE = replace(TINY, tokens=4096, experts=16)


def test_every_default_shape_exists_and_b1_is_the_project_s():
    assert {name for names in DEFAULTS.values() for name in names} <= SHAPES.keys()
    b1 = SHAPES["b1"]
    assert (b1.tokens, b1.d, b1.r, b1.f, b1.experts, b1.k, b1.f_pad) == (16384, 2048, 64, 5461, 1024, 2, 5472)


def test_a_token_s_experts_differ_and_uniform_loads_are_even():
    index = indices(WIDE, "cpu")
    assert index.shape == (4096, 2)
    assert (index[:, 0] != index[:, 1]).all()
    counts = index.flatten().bincount(minlength=16)
    assert counts.max() < 1.3 * counts.min()


def test_zipf_loads_fall_as_one_over_the_rank():
    counts = indices(replace(WIDE, routing="zipf"), "cpu")[:, 0].bincount(minlength=16).sort(descending=True).values
    # of the first choice alone: 1/n over their sum, 3.38
    want = 4096 / torch.arange(1, 17) / 3.3807
    assert ((counts - want).abs() / want)[:8].max() < 0.25


def test_trained_indices_are_read_cut_to_the_shape_and_checked(tmp_path):
    shape = replace(TINY, routing="trained")
    saved = torch.arange(2 * 60).view(60, 2) % shape.experts
    torch.save(saved, tmp_path / "index.pt")
    found = read_indices(tmp_path / "index.pt")
    assert torch.equal(make(shape, torch.float32, "cpu", trained=found).top_k_index, saved[: shape.tokens])
    with pytest.raises(ValueError, match=r"from 0 to 5"):
        make(shape, torch.float32, "cpu", trained=saved + 1)
    with pytest.raises(ValueError, match="T of at least 48"):
        make(shape, torch.float32, "cpu", trained=saved[:10])
    with pytest.raises(ValueError, match="pass --trained FILE"):
        make(shape, torch.float32, "cpu")


def test_a_file_that_holds_no_indices_is_refused_by_name(tmp_path):
    (tmp_path / "index.pt").write_text("no tensor")
    with pytest.raises(ValueError, match=r"index\.pt cannot be read"):
        read_indices(tmp_path / "index.pt")
    torch.save({"index": torch.zeros(2)}, tmp_path / "index.pt")
    with pytest.raises(ValueError, match="holds a dict"):
        read_indices(tmp_path / "index.pt")


def test_values_are_the_same_for_a_seed_and_every_float_wants_a_gradient():
    first, again = (make(SHAPES["tiny-scope"], torch.float32, "cpu") for _ in range(2))
    leaves = first.leaves()
    assert set(leaves) == {
        "hidden_states", "gate_up_proj", "scale", "down", "top_k_weights", "shared_gate_up", "shared_v", "w_down",
    }  # fmt: skip
    assert all(torch.equal(leaf, again.leaves()[name]) for name, leaf in leaves.items())
    assert all(leaf.is_leaf for leaf in leaves.values())


def test_w_down_is_padded_with_zeros_and_can_be_had_without():
    made = make(SHAPES["tiny-scope"], torch.float32, "cpu")
    assert made.w_down is not None
    assert made.w_down.shape == (32, 48)
    assert not made.w_down[:, 37:].any()
    narrow = made.unpadded().w_down
    assert narrow is not None
    assert torch.equal(narrow, made.w_down[:, :37])


def test_dropped_rows_are_those_over_capacity():
    given = replace(make(TINY, torch.float32, "cpu"), top_k_index=torch.zeros(48, 2, dtype=torch.int64))
    assert given.dropped(24) == pytest.approx(0.75)
    assert given.dropped(None) == 0


def test_a_wider_copy_has_the_same_values():
    given = make(TINY, torch.bfloat16, "cpu")
    wide = given.to(torch.float32)
    assert {leaf.dtype for leaf in wide.leaves().values()} == {torch.float32}
    assert torch.equal(wide.down.to(torch.bfloat16), given.down)
    assert problem.make(TINY, torch.bfloat16, "cpu").top_k_weights.dtype == torch.float32
