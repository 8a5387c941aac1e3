"""Initial values, each decided by the seed and the parameter's own name: adding a module moves no other parameter."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch
from dormouse_kernels import muon
from torch import Tensor

if TYPE_CHECKING:
    from dormouse_model.model import Dormouse


def generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator whose stream is decided by `seed` and `name` alone (SHA-256 of both)."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    # A signed 63-bit seed: torch takes no more.
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def normal(shape: torch.Size, std: float, source: torch.Generator) -> Tensor:
    """fp32 `N(0, std²)` of `shape`."""
    return torch.randn(shape, generator=source, dtype=torch.float32).mul_(std)


def orthonormal_rows(shape: torch.Size, source: torch.Generator) -> Tensor:
    """fp32 `[..., r, n]` with orthonormal rows, uniform over such matrices and unmoved by retraction.

    Errors: `ValueError` where r > n.
    """
    rows, width = shape[-2:]
    if rows > width:
        raise ValueError(f"orthonormal_rows: {rows} rows cannot be orthonormal in {width} dimensions; lower the rank")
    gaussian = torch.randn(shape, generator=source, dtype=torch.float32)
    q, r = torch.linalg.qr(gaussian.mT)
    # Without the sign of R's diagonal, Q is not uniform: LAPACK fixes its signs.
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    return muon.retract(q.mT.contiguous())


def decay_bias(size: int, source: torch.Generator, low: float = 1e-3, high: float = 1e-1) -> Tensor:
    """Inverse softplus of log-uniform [low, high], fp32 `[size]`: flash-linear-attention's initial `dt_bias`."""
    uniform = torch.rand(size, generator=source, dtype=torch.float32)
    step = torch.exp(uniform * (math.log(high) - math.log(low)) + math.log(low)).clamp_(min=1e-4)
    return step + torch.log(-torch.expm1(-step))


@torch.no_grad()
def initialize(model: Dormouse, seed: int) -> None:
    """Fill every parameter of `model` in place.

    Linear maps start at `N(0, 1/fan_in)`, gates at zero so that every branch is half open, the head small so that the
    first loss is near 8 bits a byte. Tables start at zero: a row that training never read says nothing. Factors are
    orthonormal, their spectrum `(f/r)^(1/4)` in both latents: h then has an RMS near 0.6 whatever the shape
    (`s = s' = sqrt(f/r)` would give 6).
    """
    factors = {factor.name: factor for factor in model.factors()}
    for name, parameter in model.named_parameters():
        source = generator(seed, name)
        if name in factors:
            factor = factors[name]
            rows = orthonormal_rows(factor.rows(factor.high).shape, source)
            factor.set_master(factor.unrows(rows).to(parameter.device))
        else:
            parameter.copy_(_values(name, parameter, model, source))


def _values(name: str, parameter: Tensor, model: Dormouse, source: torch.Generator) -> Tensor:
    """Initial values of one parameter that is not a factor, fp32 on the CPU."""
    shape = parameter.shape
    leaf = name.rsplit(".", 1)[-1]
    if name == "alpha" or name.endswith("norm.weight"):
        return torch.ones(shape)
    if leaf in ("A_log", "bias", "tables") or name in ("block.controller.weight", "block.memory.engram.conv.weight"):
        return torch.zeros(shape)
    if leaf == "dt_bias":
        return decay_bias(shape[0], source)
    if leaf == "scale":
        return torch.full(shape, (model.config.experts.d_ffn / (shape[-1] // 2)) ** 0.25)
    if leaf == "iteration_embedding":
        return normal(shape, 0.1, source)
    if name == "embedding.weight":
        return normal(shape, 1.0, source)
    if name == "head.weight":
        return normal(shape, 0.02, source)
    if name == "block.experts.down.weight":
        used = model.config.experts.d_ffn
        return torch.nn.functional.pad(normal(torch.Size((shape[0], used)), used**-0.5, source), (0, shape[1] - used))
    return normal(shape, shape[-1] ** -0.5, source)
