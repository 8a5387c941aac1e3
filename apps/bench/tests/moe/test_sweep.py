"""The sweep: every size measured or told of, losers and winners by name."""

import datetime

from dormouse_bench.moe import sweep
from dormouse_bench.rows import Origin, Row

ORIGIN = Origin(machine="m", torch="t", triton="t", commit="unknown", date=datetime.date(2026, 1, 1))


def test_a_cpus_sweep_measures_what_runs_there_and_says_what_does_not():
    outcomes = {each.name: each for each in sweep.run(sweep.shapes("cpu"), "cpu", 1, ORIGIN)}
    assert outcomes.keys() == {"latent-e4-n12-r16-d32", "glu-e4-n12-r16-d32"}
    # an odd width, which torch's product does not take
    assert "torch-grouped-mm absent (strides" in outcomes["latent-e4-n12-r16-d32"].line()
    for outcome in outcomes.values():
        assert "padded" in {row.implementation for row in outcome.rows}
        assert outcome.wrong == []


def test_a_gpus_sizes_have_names_of_their_own_and_stay_below_the_bound():
    sizes = sweep.shapes("cuda")
    assert len(sizes) > 60
    assert all(shape.rows <= sweep.MOST_ROWS for shape in sizes.values())
    assert {shape.op for shape in sizes.values()} == {"latent_glu_experts", "glu_experts"}


def row(shape, implementation, ms):
    return Row(
        bench="sweep", shape=shape, phase="fwd+bwd", implementation=implementation, ms=ms, floor_ms=None,
        peak_extra_bytes=None, **ORIGIN.model_dump(),
    )  # fmt: skip


def test_the_winner_is_the_fastest_of_a_shape():
    rows = [row("a", "triton", 2.0), row("a", "padded", 1.0), row("b", "triton", 3.0)]
    assert sweep.winners(rows) == {("a", "fwd+bwd"): "padded", ("b", "fwd+bwd"): "triton"}
