"""Which implementation of an expert pass runs: one pure function of the call's shapes, dtype and device."""

from __future__ import annotations

from typing import NamedTuple

import torch

AUTO = "auto"
TRITON = "triton"
IMPLEMENTATIONS: tuple[str, ...] = ("reference", "padded", TRITON)
TRITON_RANKS = (16, 32, 64, 128)
_TRITON_REASONS = {
    "latent_glu_experts": "reads every expert's weights once, expands nothing and never syncs",
    "glu_experts": "multiplies each expert's rows alone, gathers as it reads and never syncs",
}


class Choice(NamedTuple):
    """An implementation, why it was chosen, and what was said of every one that was considered."""

    implementation: str
    reason: str
    considered: tuple[tuple[str, str], ...]


def choose(
    op_name: str,
    *,
    implementation: str = AUTO,
    T: int,
    k: int,
    num_experts: int,
    d: int,
    r: int,
    f: int,
    dtype: torch.dtype,
    device: str,
) -> Choice:
    """The implementation that a call of `op_name` gets. It sees shapes only, so it never depends on the routing.

    T tokens, k choices a token, hidden width d, latent width r (I for `glu_experts`), output width f; `dtype` of the
    operands, `device` a device type. A name other than "auto" is taken as given. Errors: `ValueError` for an unknown
    name, with the list.
    """
    if implementation != AUTO and implementation not in IMPLEMENTATIONS:
        known = ", ".join((AUTO, *IMPLEMENTATIONS))
        raise ValueError(f"{op_name}: implementation is {implementation!r}; pass one of {known}")
    if implementation != AUTO:
        return Choice(implementation, "asked for by name", ((implementation, "asked for by name"),))
    if device == "cpu":
        # Forward and backward at T 4096, k 2, E 16, d 192, r 16, f 512, bf16 banks, two cores of an EPYC, torch 2.13:
        # reference 18 ms and padded 19 on uniform routing, 21 and 146 where one expert takes a quarter of the rows.
        considered = (
            ("reference", "one product an expert, no padding: the faster of the two on two cores"),
            (
                "padded",
                "computes every expert at the largest count: slower on a CPU, and more so the more skewed the routing",
            ),
            (TRITON, "needs a CUDA device"),
        )
        return Choice("reference", considered[0][1], considered)
    others = (
        ("padded", "a few batched products whatever the number of experts"),
        ("reference", "launches a product an expert and reads the offsets back"),
    )
    # No limit of rows an expert: `bench sweep` found `padded` slower at every size that it has (one H200).
    unfit = _triton_unfit(op_name, k=k, r=r, dtype=dtype)
    if unfit is None:
        reason = _TRITON_REASONS[op_name]
        return Choice(TRITON, reason, ((TRITON, reason), *others))
    return Choice("padded", others[0][1], (others[0], (TRITON, unfit), others[1]))


def _triton_unfit(op_name: str, *, k: int, r: int, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels are not the choice on a CUDA device for this shape; None where they are."""
    if op_name != "latent_glu_experts":
        fits = k >= 1 and dtype != torch.float64
        return None if fits else "takes k of at least 1 and up to four bytes an element"
    if r not in TRITON_RANKS:
        return f"has no tile for rank {r} ({', '.join(map(str, TRITON_RANKS))} have)"
    if k < 1 or dtype == torch.float64:
        return "takes k of at least 1 and up to four bytes an element"
    return None
