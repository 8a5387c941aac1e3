"""Rows of the sm120 table for the grouped products: the launches of Qwen3's experts, with the tiles of each card."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from dormouse_kernels.aot import Build, Pointer, compile_kernels
from dormouse_kernels.moe.grouped import backward, forward, launches
from dormouse_kernels.moe.grouped.sources import SLOT, SORTED, TOKEN
from dormouse_kernels.moe.grouped.tiles import Tiles, tiles_for
from dormouse_kernels.moe.routing import Routing, TileMap
from dormouse_kernels.proof import archs

QWEN3 = {"T": 16384, "D": 2048, "I": 768, "E": 128, "k": 8}
UNEVEN = {**QWEN3, "D": 2064, "I": 784}
"""Widths that no block divides, in rows that are still 16-byte aligned."""
CASES = {
    "qwen3": (QWEN3, torch.bfloat16, 1024),
    "qwen3, few rows": (QWEN3, torch.bfloat16, 64),
    "uneven widths": (UNEVEN, torch.bfloat16, 1024),
    "fp32": (QWEN3, torch.float32, 1024),
    "persistent": (QWEN3, torch.bfloat16, 1024),
}
HELPERS = {
    "multiply_rows": (
        forward.place_of,
        forward.source_of,
        forward.contract,
        forward.multiply_tile,
        forward.zero_tile,
    ),
    "gated_rows": (
        forward.place_of,
        forward.is_idle,
        forward.contract,
        forward.halves,
        forward.store_gated,
        forward.gated_tile,
    ),
    "gate_gradients": (
        forward.place_of,
        forward.is_idle,
        forward.contract,
        forward.halves,
        backward.through_gate,
        backward.gate_tile,
    ),
    "bank_gradients": (forward.source_of,),
}


def meta(*shape: int, of: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(*shape, dtype=of, device="meta")


def launches_of(tiles: Tiles, arch: int, dtype: torch.dtype, *, T: int, D: int, I: int, E: int, k: int) -> list[Build]:
    """The launches of a forward and a full backward over meta tensors, in order."""
    builds: list[Build] = []

    def keep(kernel: Any, grid: Any, arguments: dict[str, Any], *, num_warps: int = 4, num_stages: int = 3) -> None:
        named = {n: Pointer(a.dtype) if isinstance(a, torch.Tensor) else a for n, a in arguments.items()}
        builds.append(Build(kernel, named, arch, num_warps, num_stages))

    slots = T * k
    long = torch.int64
    routing = Routing(meta(T, k, of=long), E, meta(E, of=long), meta(E + 1, of=long), meta(slots), meta(slots), None)
    cut = TileMap(0, meta(E + 2), meta(4 * slots), meta(E + 1), slots)
    x, gate_up, down = (meta(*shape, of=dtype) for shape in ((T, D), (E, 2 * I, D), (E, D, I)))
    weights = meta(T, k, of=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches, "launch", keep)
        pre, act = launches.gated(x, gate_up, weights, routing, cut, tiles.up)
        launches.multiply(act, down.mT, routing, cut, tiles.down, source=SORTED, target=SLOT)
        launches.gate_gradients(x, down, pre, weights, routing, cut, tiles.gate)
        launches.multiply(pre, gate_up, routing, cut, tiles.dx, source=SORTED, target=SLOT)
        launches.wgrad(pre, x, routing, gate_up, tiles.grad_up, sources=(SORTED, TOKEN))
        launches.wgrad(x, act, routing, down, tiles.grad_down, sources=(TOKEN, SORTED))
        launches.multiply(act, down.mT, routing, cut, tiles.mm, source=SORTED, target=SORTED)
        launches.wgrad(pre, act, routing, meta(E, 2 * I, I, of=dtype), tiles.wgrad, sources=(SORTED, SORTED))
    return builds


def tiles_of(name: str, arch: int, dtype: torch.dtype, rows: int) -> Tiles:
    tiles = tiles_for(divmod(arch, 10), dtype.itemsize, rows)
    if name != "persistent":
        return tiles
    looped = {kernel: replace(getattr(tiles, kernel), persistent=1, piece=16) for kernel in ("up", "gate", "mm")}
    return replace(tiles, **looped)


@pytest.fixture(scope="module")
def built(request):
    """Every case on every card, compiled at once: a process that compiles takes longer to start than most kernels."""
    builds = {
        (name, arch): launches_of(tiles_of(name, arch, dtype, rows), arch, dtype, **sizes)
        for name, (sizes, dtype, rows) in CASES.items()
        for arch in archs(request.config)
    }
    for (name, _), all_ in builds.items():
        if name != "qwen3":
            # one launch of each kernel: the others differ in strides alone
            all_[:] = {build.kernel: build for build in all_ if build.kernel is not backward.sum_parts}.values()
    compiled = iter(compile_kernels([build for all_ in builds.values() for build in all_]))
    return {key: [(build.kernel, next(compiled)) for build in all_] for key, all_ in builds.items()}


@pytest.mark.parametrize("name", CASES)
def test_every_launch_fits_the_card_without_spills_or_narrow_accesses(proof, built, arch, name):
    for kernel, compiled in built[name, arch]:
        proof.compiled(compiled, name, kernels=(kernel, *HELPERS.get(kernel.fn.__name__, ())))


def test_every_operand_of_a_bf16_product_is_copied_asynchronously(built, arch):
    for kernel, compiled in built["qwen3", arch]:
        if kernel is not backward.sum_parts:
            # two operands, each in the loop and ahead of it
            assert compiled.async_copies.get(16, 0) >= 4, kernel.fn.__name__
            # sm_100's products are no instruction of that family
            assert compiled.mma or arch == 100, kernel.fn.__name__
