"""The launcher refuses what the interpreter gets wrong, and tiles that only the interpreter would take."""

import pytest
import torch
from dormouse_kernels.launch import check_dot, interpreting, launch
from dormouse_kernels.proof import surrounded

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's own behaviour")


def product(planted, dtype, M=16, N=16, K=32):
    generator = torch.Generator().manual_seed(5)
    a = surrounded(torch.randn(M, K, generator=generator).to(dtype))
    b = surrounded(torch.randn(K, N, generator=generator).to(dtype))
    c = torch.empty(M, N)
    tile = {"BM": 16, "BN": 16, "BK": 16}
    launch(
        planted.matmul,
        (-(-M // 16), -(-N // 16)),
        {"a": a, "b": b, "c": c, "M": M, "N": N, "K": K, "stride_a": K, "stride_b": N, "stride_c": N, **tile},
    )
    return c, a.float() @ b.float()


def test_these_tests_are_interpreted():
    assert interpreting()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(16, 16, 32), (17, 5, 37), (1, 33, 1)])
def test_the_interpreter_multiplies_fp32_and_fp16_right(planted, dtype, shape):
    got, want = product(planted, dtype, *shape)
    assert (got - want).abs().max() <= 1e-5


def test_bf16_in_the_interpreter_is_refused_by_name(planted):
    with pytest.raises(TypeError, match="matmul: a is bfloat16, which Triton's interpreter computes wrong"):
        product(planted, torch.bfloat16)


def test_bf16_in_the_interpreter_would_be_garbage(planted):
    """Why it is refused: launched past the check, the product is off by more than all its values."""
    a = torch.randn(16, 16, generator=torch.Generator().manual_seed(5)).bfloat16()
    c = torch.empty(16, 16)
    planted.matmul[(1, 1)](a, a, c, 16, 16, 16, 16, 16, K=16, BM=16, BN=16, BK=16)
    want = a.float() @ a.float()
    assert not (c - want).norm() < 10 * want.norm()


def test_a_read_past_the_end_shows_as_nan(planted):
    x = surrounded(torch.randn(11, generator=torch.Generator().manual_seed(5)))
    out = torch.empty(1)
    launch(planted.sum_rows, (1,), {"x": x, "out": out, "ROWS": 11, "BLOCK": 16})
    torch.testing.assert_close(out[0], x.sum())
    launch(planted.sum_rows, (1,), {"x": x, "out": out, "ROWS": 12, "BLOCK": 16})
    assert out.isnan().all()


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        (
            {"m": 16, "n": 16, "k": 8, "itemsize": 2},
            "glu: a tl.dot contracts 8 columns a tile, and 2-byte operands need 16",
        ),
        ({"m": 16, "n": 16, "k": 16, "itemsize": 1}, "contracts 16 columns a tile, and 1-byte operands need 32"),
        ({"m": 24, "n": 16, "k": 16, "itemsize": 2}, "glu: tile side m is 24; pass a power of two"),
        ({"m": 16, "n": 0, "k": 16, "itemsize": 2}, "glu: tile side n is 0; pass a power of two"),
    ],
)
def test_a_dot_that_only_the_interpreter_would_take_is_refused(tile, message):
    with pytest.raises(ValueError, match=message):
        check_dot("glu", **tile)


def test_a_dot_that_the_compiler_takes_passes():
    check_dot("glu", m=16, n=128, k=16, itemsize=2)
    check_dot("glu", m=1, n=16, k=32, itemsize=1)
