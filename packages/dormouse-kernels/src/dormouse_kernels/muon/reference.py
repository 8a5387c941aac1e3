"""Muon on orthonormal factors, in plain torch, batched over every leading dimension.

A matrix is held as rows, [..., r, n] with r <= n: a factor with orthonormal columns is passed as `v.mT`. Everything
happens on the r × r Gram matrix R = X Xᵀ, so an iteration costs r³ and not r²·n.
"""

from __future__ import annotations

from typing import Literal

import torch

from dormouse_kernels.muon.coefficients import DESIGNED

_TINY = torch.finfo(torch.float32).tiny


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 -> (high bfloat16, low int16) with high = (bits + 0x8000) >> 16 and low = bits & 0xFFFF, any shape.

    `join_master` gives every bit back. high is master rounded to the nearest bf16, ties away from zero, so it can be
    the bank that compute reads. Within half a bf16 step of the fp32 maximum it reads infinity, and a NaN may read
    zero or infinity: check gradients for finiteness, not banks. Errors: `TypeError` for another dtype.
    """
    if master.dtype != torch.float32:
        raise TypeError(f"split_master: master is {master.dtype}; pass the float32 master")
    bits = master.contiguous().view(torch.int32)
    high = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    low = ((bits << 16) >> 16).to(torch.int16)
    return high, low


def join_master(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """(high bfloat16, low int16) -> fp32: the inverse of `split_master`, exact for all 2³² patterns.

    Errors: `TypeError` for other dtypes, `ValueError` for two shapes or devices.
    """
    if high.dtype != torch.bfloat16 or low.dtype != torch.int16:
        raise TypeError(
            f"join_master: high is {high.dtype} and low is {low.dtype}; pass bfloat16 high and int16 low halves"
        )
    if high.device != low.device:
        raise ValueError(f"join_master: high is on {high.device} but low is on {low.device}; move one of them")
    if high.shape != low.shape:
        raise ValueError(f"join_master: high is {list(high.shape)} but low is {list(low.shape)}; pass one shape")
    # low is signed: where bit 15 is set, high was rounded up by one and low takes it back
    bits = (high.contiguous().view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)
    return bits.view(torch.float32)


def orthogonalize(x: torch.Tensor, steps: int = 4) -> torch.Tensor:
    """`(x xᵀ)^(-1/2) x` nearly: x [..., r, n] -> its polar factor in x's dtype: singular values within 0.1 of 1.

    That holds for singular values above `coefficients.LOWER[steps]` of ‖x xᵀ‖_F^(1/2); smaller ones are lifted as
    far as the polynomials reach. Any scale of x gives the same result, and zero gives exactly zero. Computed in fp32
    (fp64 for fp64). Errors: `ValueError` for steps without coefficients or r > n, `TypeError` for what is no float.
    Source: Newton–Schulz on the Gram matrix, as in Dao-AILab's gram-newton-schulz; coefficients of arXiv 2505.16932.
    """
    if steps not in DESIGNED:
        raise ValueError(f"orthogonalize: steps is {steps}; pass one of {', '.join(map(str, DESIGNED))}")
    _check_rows("orthogonalize", "x", x)
    wide = _widened(x)
    # ‖R‖_F below squares twice: at 1e-12 it would underflow, so the largest entry is made 1 first
    unit = wide / wide.abs().amax(dim=(-2, -1), keepdim=True).clamp_(min=_TINY)
    gram = unit @ unit.mT
    # ‖R‖_F^(1/2) = (Σσ⁴)^(1/4) bounds σ_max, more tightly than ‖x‖_F does
    norm = torch.linalg.matrix_norm(gram, keepdim=True).clamp_(min=_TINY)
    gram = gram / norm
    total = None
    for a, b, c in DESIGNED[steps]:
        step = _plus_identity(b * gram + c * (gram @ gram), a)
        total = step if total is None else step @ total
        gram = step @ gram @ step
    assert total is not None
    return ((total @ unit) / norm.sqrt()).to(x.dtype)


def retract(x: torch.Tensor, steps: int = 3, *, bound: float | None = None) -> torch.Tensor:
    """The nearest matrix with orthonormal rows: x [..., r, n] -> its polar factor, in x's dtype (fp32 or fp64).

    Newton's cubic p(σ) = (3σ − σ³)/2 on the Gram matrix: p(1) = 1 and p′(1) = 0, so orthonormal rows stay as they
    are to rounding, and an error ε becomes about 3/2·ε². x is first scaled to mean σ² = 1, or further down where a
    singular value would lie outside the cubic's basin; it never diverges, but dependent rows stay dependent.

    `bound`: refuse (reading the device) a result whose `orthonormality_error` exceeds it. Errors: `TypeError` for
    low precision, where the iteration stops at 3e-3; `ValueError` for r > n or over `bound`, naming the matrix.
    """
    if x.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"retract: x is {x.dtype}; pass the float32 master, join_master(high, low)")
    _check_rows("retract", "x", x)
    gram = x @ x.mT
    mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1)
    # the largest row sum bounds σ_max², and 2.9 < 3 keeps p from reaching zero
    largest = gram.abs().sum(-1).amax(-1)
    square = torch.maximum(mean, largest / 2.9).clamp_(min=_TINY)[..., None, None]
    gram = gram / square
    total = None
    for _ in range(steps):
        step = _plus_identity(-0.5 * gram, 1.5)
        total = step if total is None else step @ total
        gram = step @ gram @ step
    out = x if total is None else (total @ x) / square.sqrt()
    if bound is not None:
        _refuse_over(bound, orthonormality_error(out))
    return out


def orthonormality_error(x: torch.Tensor) -> torch.Tensor:
    """‖x xᵀ − I‖_F / √r of each matrix: x [..., r, n] -> [...], fp32 (fp64 for fp64)."""
    _check_rows("orthonormality_error", "x", x)
    wide = _widened(x)
    error = _plus_identity(wide @ wide.mT, -1.0)
    return torch.linalg.matrix_norm(error) / x.shape[-2] ** 0.5


def muon_factor_step(
    master: torch.Tensor,
    grad: torch.Tensor,
    momentum: torch.Tensor,
    *,
    lr: float | torch.Tensor,
    beta: float = 0.95,
    nesterov: bool = True,
    steps: int = 4,
    retract: Literal["step", "never"] = "step",
    active: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`m ← β·m + (1−β)·g; W ← polar(W − lr·orthogonalize(u))`, u = (1−β)·g + β·m with Nesterov, else m.

    master [..., r, n] fp32 with orthonormal rows, grad and momentum of its shape in any float; returns the new
    (master, momentum), momentum in its own dtype. `lr` is an angle: the update has singular values near 1.
    `active` [...] bool: where it is false both come back bit for bit (an expert without rows has a zero gradient,
    but stale momentum would still turn it by a full step). `retract="never"` leaves the polar factor out.
    No host sync. Errors: `TypeError` or `ValueError`, naming the argument.
    """
    if master.dtype != torch.float32:
        raise TypeError(f"muon_factor_step: master is {master.dtype}; pass the float32 master")
    for name, tensor in (("grad", grad), ("momentum", momentum)):
        _check_float("muon_factor_step", name, tensor)
        if tensor.device != master.device:
            raise ValueError(
                f"muon_factor_step: {name} is on {tensor.device} but master is on {master.device}; move one of them"
            )
        if tensor.shape != master.shape:
            raise ValueError(
                f"muon_factor_step: {name} is {list(tensor.shape)} but master is {list(master.shape)}; pass one shape"
            )
    if retract not in ("step", "never"):
        raise ValueError(f"muon_factor_step: retract is {retract!r}; pass 'step' or 'never'")
    gradient = grad.float()
    mean = torch.lerp(momentum.float(), gradient, 1 - beta)
    direction = torch.lerp(gradient, mean, beta) if nesterov else mean
    new_master = master - lr * orthogonalize(direction, steps)
    if retract == "step":
        new_master = _retract(new_master)
    new_momentum = mean.to(momentum.dtype)
    if active is None:
        return new_master, new_momentum
    if active.shape != master.shape[:-2] or active.dtype != torch.bool:
        raise ValueError(
            f"muon_factor_step: active is {active.dtype} {list(active.shape)}; "
            f"pass bool {list(master.shape[:-2])}, one a matrix"
        )
    mask = active[..., None, None]
    return torch.where(mask, new_master, master), torch.where(mask, new_momentum, momentum)


_retract = retract
"""The function, where an argument has its name."""


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _plus_identity(x: torch.Tensor, value: float) -> torch.Tensor:
    """Adds value·I in place."""
    x.diagonal(dim1=-2, dim2=-1).add_(value)
    return x


def _check_float(function: str, name: str, x: torch.Tensor) -> None:
    if not x.is_floating_point():
        raise TypeError(f"{function}: {name} is {x.dtype}; pass a floating-point tensor")


def _check_rows(function: str, name: str, x: torch.Tensor) -> None:
    _check_float(function, name, x)
    if x.dim() < 2 or x.shape[-2] > x.shape[-1]:
        raise ValueError(
            f"{function}: {name} has shape {list(x.shape)}; pass [..., r, n] with r <= n, {name}.mT for columns"
        )


def _refuse_over(bound: float, error: torch.Tensor) -> None:
    bad = ~(error <= bound)  # NaN is over any bound
    if bool(bad.any()):
        first = [int(i) for i in bad.nonzero()[0]]
        raise ValueError(
            f"retract: matrix {first} has orthonormality error {float(error[tuple(first)]):.2e}, over {bound:g}; "
            "its rows are nearly dependent, draw it anew"
        )
