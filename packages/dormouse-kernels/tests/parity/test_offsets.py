"""Rows of the parity table for the offset helper."""

import pytest
import torch
from dormouse_kernels.launch import launch
from dormouse_kernels.offsets import row_offset

PAIRS = [(393_241, 5_461), (6_145, 349_504), (319, 7_864_320), (393_241, -5_461), (0, 5_461)]


@pytest.mark.parametrize("level", ["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_row_offset_is_exact_past_two_billion(proof, planted, level):
    def measure(device):
        off = 0
        for index, stride in PAIRS:
            tensors = [torch.tensor([value], dtype=torch.int32, device=device) for value in (index, stride)]
            out = torch.empty(1, dtype=torch.int64, device=device)
            launch(planted.offset_of, (1,), {"index": tensors[0], "stride": tensors[1], "out": out, "WIDE": True})
            off = max(off, abs(out.item() - index * stride))
        return {"offset": float(off)}

    proof.parity(
        "row_offset / Python integers", f"{len(PAIRS)} pairs", torch.int64, level,
        bound=0.0, measure=measure, kernels=(row_offset,),
    )  # fmt: skip
