"""Offsets into tensors with more than 2³¹ elements, for kernels.

A bank [6145, 64, 5461] or rows [393241, 5461] pass 2³¹ − 1 elements, and Triton multiplies two int32 in int32: the
product wraps to a negative offset, silently.
"""

import triton
import triton.language as tl


@triton.jit
def row_offset(index, stride):
    """`index · stride` in int64, whatever the two integer types: how every kernel here steps along rows and experts."""
    return tl.cast(index, tl.int64) * stride
