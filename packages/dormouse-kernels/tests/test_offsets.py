"""Offsets past 2³¹: computed on the CPU, where the interpreter wraps int32 exactly as a GPU does."""

import pytest
import torch
from dormouse_kernels.launch import launch

LARGE = {
    "rows of b1's h": (393_241, 5_461, 2_147_489_101),
    "V of 6145 experts": (6_145, 349_504, 2_147_702_080),
    "a strided view": (319, 7_864_320, 2_508_718_080),
    "a negative stride": (393_241, -5_461, -2_147_489_101),
}


def offset(planted, index, stride, *, wide):
    out = torch.empty(1, dtype=torch.int64)
    tensors = [torch.tensor([value], dtype=torch.int32) for value in (index, stride)]
    launch(planted.offset_of, (1,), {"index": tensors[0], "stride": tensors[1], "out": out, "WIDE": wide})
    return out.item()


@pytest.mark.parametrize("name", LARGE)
def test_an_offset_past_two_billion_elements_is_exact(planted, name):
    index, stride, expected = LARGE[name]
    assert offset(planted, index, stride, wide=True) == expected


def test_without_the_helper_it_wraps(planted):
    """The planted bug, so that the test above is known to see one."""
    assert offset(planted, 319, 7_864_320, wide=False) == -1_786_249_216
