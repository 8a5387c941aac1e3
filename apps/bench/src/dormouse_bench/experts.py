"""The latent expert pass, its implementations side by side on the same rows in one run.

A ratio is given only when the arms agree: outputs and every gradient within rounding of the first arm's.
Letters: T tokens, k choices a token, E experts, d model, r rank, f ffn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from dormouse_kernels import latent_glu_experts, route
from dormouse_model.config import named_configs
from dormouse_train.config import Config, load_config

from dormouse_bench.agreement import ROUNDING, DisagreementError, distance
from dormouse_bench.rows import Origin, Row
from dormouse_bench.timing import Race, peak_extra_bytes, race

IMPLEMENTATIONS = ("reference", "padded")
Work = Callable[[], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Shape:
    """Sizes of one expert pass."""

    tokens: int
    d: int
    r: int
    f: int
    experts: int
    k: int


def shapes() -> dict[str, Shape]:
    """Sizes by name: those of every named configuration at its own step."""
    return {name: _shape(load_config(name)) for name in named_configs()}


def _shape(config: Config) -> Shape:
    experts = config.experts
    return Shape(
        tokens=config.train.batch * config.train.seq,
        d=config.model.d_model,
        r=experts.rank,
        f=experts.d_ffn,
        experts=experts.num_experts,
        k=experts.top_k,
    )


@dataclass(frozen=True)
class Comparison:
    """Rows of every arm and phase, and the race of each phase."""

    rows: list[Row]
    races: dict[str, Race]


class Arguments(NamedTuple):
    """The tensors of one call, in the order that `latent_glu_experts` takes them."""

    hidden_states: torch.Tensor
    gate_up_proj: torch.Tensor
    scale: torch.Tensor
    v: torch.Tensor
    top_k_index: torch.Tensor
    top_k_weights: torch.Tensor


def arguments(shape: Shape, dtype: torch.dtype, device: str, seed: int = 0) -> Arguments:
    """Hidden states of `dtype`, bf16 banks as a model holds them, uneven loads; the floating ones want gradients.

    The values are the same for a seed on every device.
    """
    source = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=source)

    def leaf(values: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        return values.to(device, kind).requires_grad_()

    preference = normal(shape.experts)  # some experts are liked more than others
    weights, index = (normal(shape.tokens, shape.experts) + preference).softmax(-1).topk(shape.k)
    return Arguments(
        hidden_states=leaf(normal(shape.tokens, shape.d), dtype),
        gate_up_proj=leaf(normal(shape.experts, 2 * shape.r, shape.d) * shape.d**-0.5, torch.bfloat16),
        scale=leaf(1 + 0.1 * normal(shape.experts, 2 * shape.r), torch.float32),
        v=leaf(normal(shape.experts, shape.f, shape.r) * shape.r**-0.5, torch.bfloat16),
        top_k_index=index.to(device),
        top_k_weights=leaf(weights / weights.sum(-1, keepdim=True), torch.float32),
    )


def passes(given: Arguments, implementation: str) -> dict[str, Work]:
    """The two phases of one arm, each returning what it computed by name; routing is made once, outside."""
    routing = route(given.top_k_index, given.gate_up_proj.shape[0])
    wanted = {name: tensor for name, tensor in given._asdict().items() if tensor.requires_grad}

    def run() -> torch.Tensor:
        return latent_glu_experts(*given, routing=routing, implementation=implementation)

    def forward() -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return {"out": run()}

    upstream = torch.randn(forward()["out"].shape, generator=torch.Generator().manual_seed(1))

    def both() -> dict[str, torch.Tensor]:
        out = run()
        gradients = torch.autograd.grad(out, list(wanted.values()), upstream.to(out))
        return {f"grad {name}": gradient for name, gradient in zip(wanted, gradients, strict=True)}

    return {"fwd": forward, "fwd+bwd": both}


def refuse_disagreement(
    arm: str, got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], computed: torch.dtype
) -> None:
    """Raises `DisagreementError` for the first tensor that is further from the first arm's than rounding can bring it.

    A tensor is rounded as its own dtype and as the dtype that it was computed in.
    """
    for name, want in expected.items():
        far = distance(got[name], want)
        allowed = max(ROUNDING[want.dtype], ROUNDING[computed])
        if not far <= allowed:  # a NaN is a disagreement
            raise DisagreementError(
                f"experts: {arm} is {far:.1e} away from {IMPLEMENTATIONS[0]} in {name}, rounding allows "
                f"{allowed:.0e}; times of arms that compute different things are not compared"
            )


def compare(name: str, shape: Shape, device: str, dtype: torch.dtype, rounds: int, origin: Origin) -> Comparison:
    """Checks that the implementations agree at a shape, then times them in turn, forward and with backward."""
    given = arguments(shape, dtype, device)
    arms = {implementation: passes(given, implementation) for implementation in IMPLEMENTATIONS}
    rows, races = [], {}
    for phase in ("fwd", "fwd+bwd"):
        works = {implementation: arm[phase] for implementation, arm in arms.items()}
        expected = works[IMPLEMENTATIONS[0]]()
        for implementation in IMPLEMENTATIONS[1:]:
            refuse_disagreement(implementation, works[implementation](), expected, dtype)
        gradients = sum(tensor.nbytes for tensor in expected.values()) if phase == "fwd+bwd" else 0
        races[phase] = race(works, device, rounds)
        for implementation, work in works.items():
            row = Row(
                bench="experts",
                shape=name,
                phase=phase,
                implementation=implementation,
                ms=races[phase].ms[implementation],
                floor_ms=None,
                peak_extra_bytes=peak_extra_bytes(work, device, gradients),
                **origin.model_dump(),
            )
            rows.append(row)
    return Comparison(rows, races)
