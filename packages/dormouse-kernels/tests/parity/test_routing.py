"""Rows of the parity table for the Triton sort: integers, so every one must be the reference's."""

import pytest
import torch
from dormouse_kernels import dependents, route
from dormouse_kernels.moe.routing import kernels
from dormouse_kernels.moe.routing.sort import cut_tiles
from dormouse_kernels.moe.routing.tilemap import cut

KERNELS = (
    dependents.after_previous, kernels.slot_bins, kernels.count_blocks, kernels.scan_bins, kernels.place_slots,
    kernels.place_block, kernels.store_starts, kernels.map_part, kernels.start_tiles, kernels.map_experts,
)  # fmt: skip
SIZES = {"T 700 k 2 E 7": (700, 2, 7), "T 40 k 3 E 300": (40, 3, 300), "T 16384 k 2 E 1024": (16384, 2, 1024)}
CASES = [("interpreter", "T 700 k 2 E 7"), ("interpreter", "T 40 k 3 E 300")] + [
    pytest.param("gpu", size, marks=pytest.mark.gpu) for size in SIZES
]


def unlike(got, want):
    """The share of entries that differ."""
    return (got != want).double().mean().item() if want.numel() else 0.0


@pytest.mark.parametrize(("level", "size"), CASES)
def test_the_triton_sort_and_its_tiles_against_torchs(proof, level, size):
    T, k, E = SIZES[size]
    index = torch.randint(-1, E + 1, (T, k), generator=torch.Generator().manual_seed(0))

    def measure(device):
        got = route(index.to(device), E, tile_rows=16, implementation="triton")
        want = route(index.to(device), E, implementation="reference")
        errors = {name: unlike(getattr(got, name), getattr(want, name)) for name in ("counts", "offsets", "order")}
        errors["inverse"] = unlike(got.inverse, want.inverse)
        for name, made, tiles in (
            ("tiles 16", got.cut(16), cut(want.counts, want.offsets, T * k, 16)),
            ("tiles 128", cut_tiles(got.offsets, T * k, 128), cut(want.counts, want.offsets, T * k, 128)),
        ):
            pairs = ((made.start, tiles.start), (made.tiles, tiles.tiles), (made.long, tiles.long))
            errors[name] = max(unlike(*pair) for pair in pairs)
        return errors

    proof.parity("route triton / torch", size, torch.int64, level, bound=0.0, measure=measure, kernels=KERNELS)
