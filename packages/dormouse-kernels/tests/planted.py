"""Kernels that ship nowhere: what the proving machinery is itself proven with. Imported by path, never a test."""

import triton
import triton.language as tl
from dormouse_kernels.offsets import row_offset


@triton.jit
def matmul(
    a, b, c, M, N, stride_a, stride_b, stride_c, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """`c = a · b`: a [M, K], b [K, N], c [M, N], rows of any stride, masked in all three.

    K is a constant because Triton 3.6's interpreter cannot loop up to an argument under numpy 2.4.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        inner = start + tl.arange(0, BK)
        left = tl.load(
            a + rows[:, None] * stride_a + inner[None, :], mask=(rows < M)[:, None] & (inner < K)[None, :], other=0.0
        )
        right = tl.load(
            b + inner[:, None] * stride_b + columns[None, :],
            mask=(inner < K)[:, None] & (columns < N)[None, :],
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    tl.store(
        c + rows[:, None] * stride_c + columns[None, :],
        total.to(c.dtype.element_ty),
        mask=(rows < M)[:, None] & (columns < N)[None, :],
    )


@triton.jit
def tf32_matmul(a, b, c, SIDE: tl.constexpr):
    """A square product at `tl.dot`'s default precision."""
    at = tl.arange(0, SIDE)
    tile = at[:, None] * SIDE + at[None, :]
    tl.store(c + tile, tl.dot(tl.load(a + tile), tl.load(b + tile)))


@triton.jit
def offset_of(index, stride, out, WIDE: tl.constexpr):
    """Stores the offset of a row: by `row_offset`, or the planted bug that multiplies int32 by int32."""
    if WIDE:
        tl.store(out, row_offset(tl.load(index), tl.load(stride)))
    else:
        tl.store(out, (tl.load(index) * tl.load(stride)).to(tl.int64))


@triton.jit
def sum_rows(x, out, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums the first ROWS of BLOCK elements of x: it reads past the end where x is shorter than ROWS."""
    at = tl.arange(0, BLOCK)
    tl.store(out, tl.sum(tl.load(x + at, mask=at < ROWS, other=0.0), 0))
