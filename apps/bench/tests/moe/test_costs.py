"""The byte and operation model of an expert pass against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dormouse_bench.moe import costs
from dormouse_bench.moe.costs import Cost, Rates
from dormouse_bench.moe.shapes import B1, QWEN3, SHAPES
from dormouse_bench.moe.traffic import loads, traffic

H200 = Rates(bytes_per_second=4.3e12, flops_per_second=7.9e14)


@pytest.mark.parametrize(
    ("phase", "expanded", "megabytes"),
    [("fwd", True, 2298), ("fwd", False, 1499), ("bwd", False, 2819), ("bwd", True, 3358)],
)
def test_b1_moves_what_was_worked_out_by_hand(phase, expanded, megabytes):
    """U and U' 536.9 MB, V 715.8, x 67.1, h 178.9, p and q 8.4; rows of each choice twice x and h."""
    assert costs.routed(B1, phase, itemsize=2, expanded=expanded).bytes / 1e6 == pytest.approx(megabytes, abs=1)


def test_b1_computes_forty_gigaflops_forward_and_twice_that_backward():
    assert costs.routed(B1, "fwd", itemsize=2).flops / 1e9 == pytest.approx(40.08, abs=0.01)
    assert costs.routed(B1, "bwd", itemsize=2).flops / 1e9 == pytest.approx(80.17, abs=0.01)


def test_experts_without_rows_are_not_read_but_their_gradients_are_written():
    bank = 2 * B1.experts * (2 * B1.r * B1.d + B1.f * B1.r)
    half = costs.routed(B1, "fwd", itemsize=2, active=512)
    assert costs.routed(B1, "fwd", itemsize=2).bytes - half.bytes == bank // 2
    none = costs.routed(B1, "bwd", itemsize=2, active=0)
    assert costs.routed(B1, "bwd", itemsize=2).bytes - none.bytes == bank


def test_a_floor_is_bytes_at_b1_and_operations_at_qwen3():
    b1 = costs.floor_ms(costs.whole(B1, "fwd", itemsize=2), H200)
    assert b1 == pytest.approx(1498.7e6 / 4.3e12 * 1e3, rel=1e-3)
    both = costs.floor_ms(costs.whole(QWEN3, "fwd+bwd", itemsize=2), H200)
    # 3 · 2 · (2·768·2048 + 768·2048) operations a row, 131072 rows
    assert both == pytest.approx(3 * 131072 * 6 * 768 * 2048 / 7.9e14 * 1e3, rel=1e-6)


def test_the_whole_scope_adds_a_shared_expert_and_w_down():
    scope = SHAPES["scope"]
    parts = costs.whole(scope, "fwd", itemsize=2)
    assert parts[0] == costs.routed(B1, "fwd", itemsize=2)
    assert [part.flops for part in parts[1:]] == [
        16384 * (4 * 192 * 2048 + 2 * 192 * 5461),
        2 * 16384 * 2048 * 5461,
    ]
    assert len(costs.whole(scope, "fwd+bwd", itemsize=2)) == 6


def test_combine_reads_a_row_a_choice_and_writes_one_a_token():
    assert costs.combine(B1, itemsize=2).bytes / 1e6 == pytest.approx(536.8, abs=0.1)


def test_an_unknown_phase_is_refused():
    with pytest.raises(ValueError, match="phase is 'fwd-graph'"):
        costs.routed(B1, "fwd-graph", itemsize=2)


def test_a_floor_is_the_longer_of_moving_and_computing():
    assert Cost(2000, 10).floor_ms(Rates(1e6, 1e6)) == 2.0
    assert Cost(2000, 9000).floor_ms(Rates(1e6, 1e6)) == 9.0


def test_loads_count_tiles_and_the_experts_that_have_several():
    found = loads(torch.tensor([0, 1, 64, 65, 200]), 64)
    assert (found.tiles, found.long, found.long_rows) == (1 + 1 + 2 + 4, 2, 265)


def test_launches_move_at_least_the_floor():
    even = loads(torch.full((1024,), 32), 64)
    moved = {
        kernel: traffic(kernel, B1, even, tile_rows=64, width=B1.d).bytes
        for kernel in ("latent_rows", "expand_rows", "grad_v_rows", "grad_u_rows", "sum_slots")
    }
    assert moved["latent_rows"] / 1e6 == pytest.approx(683.7, abs=0.1)
    assert moved["sum_slots"] / 1e6 == pytest.approx(201.3, abs=0.1)
    # V, z, and h stored by the first of a token's rows, read and stored again by the second
    assert moved["expand_rows"] / 1e6 == pytest.approx(715.8 + 4.2 + 3 * 178.9, abs=0.2)
    backward = sum(moved[name] for name in ("grad_v_rows", "grad_u_rows", "sum_slots"))
    assert backward > costs.routed(B1, "bwd", itemsize=2, expanded=True).bytes


def test_without_turns_every_row_is_written():
    even = loads(torch.full((1024,), 48), 64)
    three = replace(B1, k=3)
    kept, expanded = (traffic("expand_rows", three, even, tile_rows=64, turns=turns).bytes for turns in (True, False))
    assert kept - expanded == 2 * (three.tokens + 2 * 2 * three.tokens - 3 * three.tokens) * three.f


def test_an_unknown_kernel_is_refused():
    with pytest.raises(ValueError, match="kernel is 'mystery'; this model knows count_blocks"):
        traffic("mystery", B1, loads(torch.tensor([1]), 64), tile_rows=64)
