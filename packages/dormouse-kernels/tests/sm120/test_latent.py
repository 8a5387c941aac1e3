"""Rows of the sm120 table for the latent expert pass: every launch of b1, with the tiles that each card gets."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
from dormouse_kernels import dependents
from dormouse_kernels.aot import compile_kernels
from dormouse_kernels.moe.latent import backward, forward, turns
from dormouse_kernels.moe.latent.tiles import tiles_for
from dormouse_kernels.moe.routing import kernels as sort
from dormouse_kernels.proof import archs

B1 = {"T": 16384, "d": 2048, "f": 5461, "E": 1024}
CASES = {
    "b1, turns": (2, False, torch.bfloat16, 64),
    "b1, turns, residual": (2, True, torch.bfloat16, 64),
    "b1, k 3, expanded": (3, True, torch.bfloat16, 64),
    "b1, fp32": (2, False, torch.float32, 64),
    "rank 128": (2, False, torch.bfloat16, 128),
    "rank 128, residual": (2, True, torch.bfloat16, 128),
    "rank 128, fp32": (2, False, torch.float32, 128),
}
HELPERS = {
    "count_blocks": (sort.slot_bins,),
    "scan_bins": (sort.store_starts,),
    "start_tiles": (sort.store_starts,),
    "map_experts": (sort.map_part,),
    "place_slots": (sort.place_block, sort.map_part, sort.slot_bins),
    "latent_rows": (turns.row_turns, forward.read_tile),
    "expand_rows": (
        turns.store_in_turn, turns.take_ticket, turns.program_barrier, turns.wait_for, turns.residual_of,
        forward.read_tile,
    ),
    "grad_v_rows": (
        backward.store_gradient, backward.grad_v_piece, backward.latent_gradients, forward.read_tile,
        dependents.after_previous,
    ),
    "grad_u_rows": (backward.grad_scale, backward.store_gradient, forward.read_tile),
}  # fmt: skip


@pytest.fixture(scope="module")
def recorded():
    path = Path(__file__).parents[1] / "moe" / "recorded.py"
    spec = importlib.util.spec_from_file_location("recorded", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["recorded"] = module
    spec.loader.exec_module(module)
    return module


def launches_of(recorded, name, arch):
    """The launches of a case with the card's own tiles; of later cases, only what differs from the first's."""
    k, residual, dtype, rank = CASES[name]
    tiles = tiles_for(divmod(arch, 10), dtype.itemsize, rank)
    with pytest.MonkeyPatch.context() as patch:
        launched = recorded.record(patch, tiles, **B1, r=rank, k=k, dtype=dtype, residual=residual)
    if residual:
        return [each for each in launched if each.kernel.fn.__name__ in ("expand_rows", "sum_slots")]
    if dtype == torch.float32:
        return [each for each in launched if not each.kernel.fn.__module__.endswith("routing.kernels")]
    return launched


@pytest.fixture(scope="module")
def built(recorded, request):
    """Every case on every card, compiled at once: a process that compiles takes longer to start than most kernels."""
    launched = {(name, arch): launches_of(recorded, name, arch) for name in CASES for arch in archs(request.config)}
    compiled = iter(compile_kernels([each.build(arch) for (_, arch), all_ in launched.items() for each in all_]))
    return {key: [(each, next(compiled)) for each in all_] for key, all_ in launched.items()}


@pytest.mark.parametrize("name", CASES)
def test_every_launch_fits_the_card_without_spills_or_narrow_accesses(proof, built, arch, name):
    for each, compiled in built[name, arch]:
        kernels = (each.kernel, *HELPERS.get(each.kernel.fn.__name__, ()))
        proof.compiled(compiled, name, kernels=kernels)


def test_fp32_products_are_exact_and_never_tf32(built, arch):
    for _, compiled in built["b1, fp32", arch]:
        assert "tf32" not in compiled.ptx, compiled.kernel


def test_the_other_tiles_row_is_read_after_the_wait_and_not_prefetched(built, arch):
    (compiled,) = [compiled for each, compiled in built["b1, turns", arch] if each.kernel is forward.expand_rows]
    # a pipelined load would be a cp.async ahead of the loop's wait: the wait itself would then guard nothing
    # (a loop that the compiler unrolled waits several times, and reads as often after each wait)
    words = re.findall(r"ld\.acquire\.gpu\.global|ld\.global\.cg", compiled.ptx)
    before, *after = "".join("w" if "acquire" in word else "r" for word in words).split("w")
    assert before == ""
    assert after[0]
    assert set(after) == {after[0]}
