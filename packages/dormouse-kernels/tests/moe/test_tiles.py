"""Tiles that a call brings along: the same results from them, refused where they mean nothing, kept in files."""

from dataclasses import replace

import pytest
import torch
from dormouse_kernels import glu_experts, latent_glu_experts, route, tiles
from dormouse_kernels.moe import library, passes
from dormouse_kernels.moe.grouped import tiles as grouped
from dormouse_kernels.moe.latent import tiles as latent
from dormouse_kernels.proof import oracle, relative_errors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LATENT = replace(latent.INTERPRETED, rows=32, latent_d=32, expand_f=32, grad_v_f=32, grad_u_d=32, turns=False)
GROUPED = replace(
    grouped.INTERPRETED,
    up=replace(grouped.INTERPRETED.up, rows=32, depth=32),
    dx=replace(grouped.INTERPRETED.dx, cols=32),
)


def differentiated(op, case, **options):
    leaves = case.leaves()
    if op is glu_experts or op is oracle.glu_experts:
        leaves = {name: leaves[name] for name in ("hidden_states", "gate_up_proj", "v", "top_k_weights")}
        x, gate_up, down, weights = leaves.values()
        out = op(x, gate_up, down.repeat(1, 3, 1)[:, : x.shape[1]], case.top_k_index, weights, **options)
    else:
        x, gate_up, scale, v, weights, residual = leaves.values()
        out = op(x, gate_up, scale, v, case.top_k_index, weights, residual=residual, **options)
    upstream = torch.ones_like(out) * case.grad[:1, :1].to(out.dtype)
    grads = torch.autograd.grad(out, list(leaves.values()), upstream)
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


@pytest.mark.parametrize(
    ("op", "plain", "given"),
    [(latent_glu_experts, oracle.latent_glu_experts, LATENT), (glu_experts, oracle.glu_experts, GROUPED)],
)
def test_a_call_with_its_own_tiles_gives_the_same_to_rounding(latent_case, monkeypatch, op, plain, given):
    case = latent_case(T=40, E=3, dtype=torch.float32).to(torch.float32, DEVICE)
    for table in (latent, grouped):
        monkeypatch.setattr(table, "tiles_for", None)  # the table is not asked
    got = differentiated(op, case, implementation="triton", tiles=given)
    errors = relative_errors(got, differentiated(plain, case))
    assert all(error <= 3e-6 for error in errors.values()), errors


def arguments(case):
    return case.hidden_states, case.gate_up_proj, case.scale, case.v, case.top_k_index, case.top_k_weights


@pytest.mark.parametrize("implementation", ["reference", "padded"])
def test_tiles_are_refused_where_the_implementation_has_none(latent_case, implementation):
    case = latent_case()
    with pytest.raises(ValueError, match=f"tiles is given but implementation '{implementation}' runs.*; pass ti"):
        latent_glu_experts(*arguments(case), implementation=implementation, tiles=LATENT)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (GROUPED, TypeError, "latent_glu_experts: tiles is Tiles; pass what dormouse_kernels.tiles holds for latent"),
        (replace(LATENT, rows=48), ValueError, "latent_glu_experts: tiles.rows is 48; pass a power of two"),
        (replace(LATENT, expand_splits=0), ValueError, "tiles.expand_splits is 0; pass at least 1"),
        (replace(LATENT, grad_v_pieces=4), ValueError, "tiles.grad_v_pieces is 4; pass 1 or 2"),
    ],
)
def test_tiles_that_no_kernel_could_have_are_refused_by_name(latent_case, given, error, message):
    with pytest.raises(error, match=message):
        latent_glu_experts(*arguments(latent_case()), implementation="triton", tiles=given)


def test_a_size_of_one_launch_is_named_with_the_launch(latent_case):
    case = latent_case()
    given = replace(GROUPED, down=replace(GROUPED.down, warps=3))
    with pytest.raises(ValueError, match=r"glu_experts: tiles\.down\.warps is 3; pass a power of two"):
        glu_experts(case.hidden_states, case.gate_up_proj, case.gate_up_proj[:, :16].mT.contiguous(), case.top_k_index,
                    case.top_k_weights, tiles=given)  # fmt: skip


ROWS = [value for table in (latent, grouped) for value in vars(table).values() if isinstance(value, passes.Tiles)]


def test_every_row_of_the_tables_survives_a_file_and_a_registered_op(tmp_path):
    assert len(ROWS) > 10
    for row in ROWS:
        is_latent = isinstance(row, tiles.LatentTiles)
        op = "latent_glu_experts" if is_latent else "glu_experts"
        tiles.write(tmp_path / "row.json", op, row)
        assert tiles.read(tmp_path / "row.json", op) == row
        assert passes.unpack_tiles(passes.pack_tiles(row), latent=is_latent) == row


def test_a_file_of_another_op_or_of_something_else_is_refused(tmp_path):
    path = tmp_path / "row.json"
    tiles.write(path, "glu_experts", GROUPED, origin="a test")
    with pytest.raises(ValueError, match=r"row.json holds tiles of glu_experts; pass the file that was written for"):
        tiles.read(path, "latent_glu_experts")
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"row.json holds no tiles of glu_experts \('op'\); pass a file that"):
        tiles.read(path, "glu_experts")


def test_a_registered_pass_takes_the_tiles_too(latent_case):
    case = latent_case(dtype=torch.float32).to(torch.float32, DEVICE)
    x, gate_up, scale, v, weights, residual = case.leaves().values()
    routing = route(case.top_k_index, 5)
    with torch.no_grad():
        out, *_ = library.expert_pass(
            "latent_glu_experts", x, gate_up, scale, v, weights, residual, case.top_k_index, library.pack(routing)[:4],
            0, 48, None, "triton", "", passes.pack_tiles(LATENT),
        )  # fmt: skip
    want = latent_glu_experts(*arguments(case), residual=residual, implementation="triton", tiles=LATENT)
    assert torch.equal(out, want)
