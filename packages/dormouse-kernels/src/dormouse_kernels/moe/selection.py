"""Which implementation of an expert pass runs: one pure function of the call's shapes, dtype and device."""

from __future__ import annotations

from typing import NamedTuple

import torch

AUTO = "auto"
IMPLEMENTATIONS: tuple[str, ...] = ("reference", "padded")


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
        )
        return Choice("reference", considered[0][1], considered)
    considered = (
        ("padded", "a few batched products whatever the number of experts"),
        ("reference", "launches a product an expert and reads the offsets back"),
    )
    return Choice("padded", considered[0][1], considered)
