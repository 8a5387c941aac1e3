"""Engram on a GPU: the rows that a CPU reads, and gradients of the same bits every time."""

from __future__ import annotations

import pytest
import torch
from dormouse_kernels.proof import relative_errors
from dormouse_model.engram.ngrams import NONE, ngram_rows
from dormouse_model.engram.tables import read_rows


@pytest.mark.gpu
@pytest.mark.parametrize("order", range(1, 9))
def test_a_gpu_reads_the_rows_that_a_cpu_reads(proof, order):
    ids = torch.randint(0, 256, (4, 5000), dtype=torch.uint8, generator=torch.Generator().manual_seed(order))

    def measure(device: torch.device) -> dict[str, float]:
        here, there = (
            ngram_rows(text, torch.full((4, 7), NONE, device=text.device), order, 65_521, 3).cpu()
            for text in (ids, ids.to(device))
        )
        return {"rows that differ": float((here != there).sum())}

    proof.parity("engram.ngram_rows", f"B4 T5000 n{order}", torch.int64, "gpu", bound=0.0, measure=measure)


@pytest.mark.gpu
@pytest.mark.parametrize("sparse_grad", [True, False])
def test_gradients_of_a_table_on_a_gpu_are_those_of_a_cpu_and_the_same_bits_twice(proof, sparse_grad):
    source = torch.Generator().manual_seed(0)
    table, gradient = torch.randn(100, 32, generator=source), torch.randn(20_000, 32, generator=source)
    index = torch.randint(NONE, 100, (20_000,), generator=source)

    def trained(device: torch.device) -> torch.Tensor:
        leaf = table.to(device, copy=True).requires_grad_()
        read_rows(leaf, index.to(device), sparse_grad=sparse_grad).backward(gradient.to(device))
        assert leaf.grad is not None
        return leaf.grad.coalesce().to_dense() if sparse_grad else leaf.grad

    def measure(device: torch.device) -> dict[str, float]:
        once, twice = trained(device), trained(device)
        unlike = {"bits that differ": float((once != twice).sum())}
        return unlike | relative_errors({"table": once}, {"table": trained(torch.device("cpu"))})

    shape = "R100 D32 20000 reads " + ("sparse" if sparse_grad else "dense")
    proof.parity("engram.read_rows", shape, torch.float32, "gpu", bound=1e-5, measure=measure)
