"""Compiling for cards that are not here, with the launcher's own specialisation."""

import os

import pytest
import torch
from dormouse_kernels.aot import (
    SHARED_LIMITS,
    Build,
    CompileError,
    Pointer,
    compile_kernel,
    compile_kernels,
    shared_limit,
)
from dormouse_kernels.launch import interpreting

KIB = 1024


def matmul(planted, arch, *, n=4096, tile=(128, 256, 64), num_warps=8, num_stages=4, aligned=True):
    """A bf16 product with K 2048 whose pointers and sizes are all divisible by 16, or none is."""
    pointer = Pointer(torch.bfloat16, aligned)
    odd = 0 if aligned else 1
    sizes = {"M": 4096 - odd, "N": n - odd, "K": 2048 - odd}
    strides = {"stride_a": 2048 - odd, "stride_b": n - odd, "stride_c": n - odd}
    sides = dict(zip(("BM", "BN", "BK"), tile, strict=True))
    arguments = {"a": pointer, "b": pointer, "c": pointer, **sizes, **strides, **sides}
    return Build(planted.matmul, arguments, arch, num_warps, num_stages)


@pytest.fixture(scope="module")
def built(planted):
    """Every build of this file in one go: where the kernels are interpreted it is a subprocess a core."""
    small = {"tile": (64, 128, 32), "num_warps": 4, "num_stages": 3}
    square = {"a": Pointer(torch.float32), "b": Pointer(torch.float32), "c": Pointer(torch.float32), "SIDE": 32}
    offsets = {"index": Pointer(torch.int32), "stride": Pointer(torch.int32), "out": Pointer(torch.int64), "WIDE": True}
    builds = {
        "4 stages, sm_120": matmul(planted, 120),
        "4 stages, sm_90": matmul(planted, 90),
        "3 stages, sm_120": matmul(planted, 120, num_stages=3),
        "3 stages, sm_90": matmul(planted, 90, num_stages=3),
        "4 stages, sm_120, unaligned": matmul(planted, 120, aligned=False),
        "odd width": matmul(planted, 120, n=5461, **small),
        "padded width": matmul(planted, 120, n=5472, **small),
        "default precision": Build(planted.tf32_matmul, square, 120),
        "no dot": Build(planted.offset_of, offsets, 90),
    }
    return dict(zip(builds, compile_kernels(list(builds.values())), strict=True))


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        ("4 stages, sm_120", 144),
        ("3 stages, sm_120", 96),
        ("4 stages, sm_90", 192),
        ("3 stages, sm_90", 144),
        ("4 stages, sm_120, unaligned", 48),
    ],
)
def test_shared_memory_is_what_the_launcher_would_ask_for(built, name, shared):
    """One tile less on sm_120 than on sm_90, and a third of it where the divisible-by-16 attributes are missing."""
    assert built[name].shared == shared * KIB


def test_lost_alignment_shows_as_narrow_accesses_and_spills(built):
    aligned, unaligned = built["4 stages, sm_120"], built["4 stages, sm_120, unaligned"]
    assert aligned.narrow_accesses == 0
    assert aligned.spills == 0
    assert aligned.async_copies.keys() == aligned.stores.keys() == {16}
    assert unaligned.narrow_accesses > 100
    assert unaligned.spills > 0
    assert unaligned.async_copies == {}


def test_an_odd_width_costs_two_byte_accesses_and_a_padded_one_none(built):
    odd, padded = built["odd width"], built["padded width"]
    assert odd.loads[2] == 32
    assert odd.stores == {2: 64}
    assert padded.narrow_accesses == 0
    assert padded.stores == {16: 8}
    assert sum(padded.async_copies.values()) > sum(odd.async_copies.values())


def test_each_architecture_multiplies_with_its_own_instruction(built):
    assert all(kind.startswith("HMMA.16816") for kind in built["4 stages, sm_120"].mma)
    assert all(kind.startswith("HGMMA") for kind in built["4 stages, sm_90"].mma)
    assert any("TF32" in kind for kind in built["default precision"].mma)


def test_the_intermediate_code_comes_along(built):
    assert ".target sm_120a" in built["3 stages, sm_120"].ptx
    assert "tt.dot" in built["3 stages, sm_120"].ttir
    assert "tf32" in built["default precision"].ptx


def test_a_tile_that_contracts_eight_columns_does_not_compile(planted):
    with pytest.raises(CompileError, match=r"planted.matmul does not compile for sm_120: (.|\n)*K >= 16"):
        compile_kernels([matmul(planted, 120, tile=(16, 16, 8))])


def test_a_build_keeps_its_kernel_and_architecture_and_a_kernel_without_dot_has_no_mma(built):
    compiled = built["no dot"]
    assert (compiled.kernel, compiled.arch, compiled.mma) == ("planted.offset_of", 90, ())
    assert compiled.stores == {8: 1}


def test_the_interpreter_switch_of_this_process_is_left_as_it_was(built):
    """Its kernels are interpreted, so the builds were made elsewhere."""
    assert interpreting() == (os.environ.get("TRITON_INTERPRET") == "1")
    assert built


def test_what_is_no_kernel_is_refused():
    with pytest.raises(TypeError, match=r"is no Triton kernel; decorate it with @triton.jit"):
        compile_kernel(len, {}, arch=120)


def test_the_limits_of_both_cards_are_known_and_others_are_refused():
    assert shared_limit(120) == 101_376
    assert shared_limit(90) == 232_448
    with pytest.raises(ValueError, match="arch is 75; pass one of 80, 86"):
        shared_limit(75)
    assert sorted(SHARED_LIMITS) == list(SHARED_LIMITS)
