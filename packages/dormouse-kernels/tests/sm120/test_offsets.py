"""Rows of the sm120 table for the offset helper, and what its intermediate code shows."""

import pytest
import torch
from dormouse_kernels.aot import Build, Pointer, compile_kernels
from dormouse_kernels.offsets import row_offset
from dormouse_kernels.proof import archs


@pytest.fixture(scope="module")
def built(planted, request):
    pointers = {"index": Pointer(torch.int32), "stride": Pointer(torch.int32), "out": Pointer(torch.int64)}
    cards = archs(request.config)
    builds = [Build(planted.offset_of, {**pointers, "WIDE": wide}, arch) for arch in cards for wide in (True, False)]
    return {
        (build.arch, build.arguments["WIDE"]): got for build, got in zip(builds, compile_kernels(builds), strict=True)
    }


def test_row_offset_fits_both_cards(proof, built, arch):
    proof.compiled(built[arch, True], "one offset", kernels=(row_offset,))


def test_the_product_is_64_bit_in_the_intermediate_code(built, arch):
    assert "arith.muli" in built[arch, True].ttir
    assert multiplied(built[arch, True].ttir) == {"i64"}
    # the planted bug multiplies in 32 bits
    assert multiplied(built[arch, False].ttir) == {"i32"}


def multiplied(ttir):
    """The types that the module multiplies in."""
    return {line.split(":")[-1].split("loc")[0].strip() for line in ttir.splitlines() if "arith.muli" in line}
