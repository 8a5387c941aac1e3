"""The table of ops that the house rules are held to: how each is called, and small arguments that it takes.

Letters: T tokens, k choices a token, R = T·k rows, E experts. Where the rows of a tensor lie: "token" one a token,
"slot" one a choice, "sorted" one a choice in sorted order, "expert" one an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from dormouse_kernels import Routing, glu_experts, grouped_mm, grouped_wgrad, latent_glu_experts, muon, route
from dormouse_kernels.proof import oracle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INDEX = torch.tensor([[0, 2], [2, 1], [0, 2], [1, 0], [2, 0]])


class Draw:
    """Random arguments for one routing, the same for the same seed."""

    def __init__(self, index: torch.Tensor, num_experts: int, dtype: torch.dtype = torch.float32) -> None:
        self.index, self.experts, self.dtype = index.to(DEVICE), num_experts, dtype
        self.tokens, self.top_k = index.shape
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, by: float = 1.0) -> torch.Tensor:
        drawn = by * torch.randn(*shape, generator=self._generator, dtype=torch.float64)
        return drawn.to(DEVICE, self.dtype)

    def routing(self) -> Routing:
        """Of plain torch, so that every implementation of an op that takes one gets the same."""
        return route(self.index, self.experts, implementation="reference")


@dataclass(frozen=True)
class Op:
    """One row: a function, its implementations, a maker of arguments by name, and what it should give."""

    name: str
    function: Callable[..., Any]
    make: Callable[[Draw], dict[str, Any]]
    oracle: Callable[..., torch.Tensor] | None = None
    """The result in fp64, from the same arguments, as plainly as can be."""
    implementations: tuple[str, ...] = ("",)
    rows: Mapping[str, str] = field(default_factory=dict)
    """Where the rows of each argument with a gradient lie, the tokens' own first, and those of "out"."""
    free: frozenset[tuple[str, int]] = frozenset()
    """(argument, dimension) of sizes that nothing else fixes; -1: any matrices, 0 too: tensors of any shape."""
    counted: bool = True
    """Whether it reports to `Counters`."""

    @property
    def leaves(self) -> tuple[str, ...]:
        """The arguments that have gradients."""
        return tuple(name for name in self.rows if name != "out")

    def arguments(
        self, index: torch.Tensor = INDEX, num_experts: int = 3, dtype: torch.dtype = torch.float32
    ) -> dict[str, Any]:
        """Valid ones."""
        return self.make(Draw(index, num_experts, dtype))

    def run(self, arguments: Mapping[str, Any], implementation: str = "") -> dict[str, torch.Tensor]:
        """Its results by name."""
        options = {"implementation": implementation} if implementation else {}
        made = self.function(**arguments, **options)
        if isinstance(made, Routing):
            return {name: getattr(made, name) for name in ("counts", "offsets", "order", "inverse")}
        return {"out": made} if isinstance(made, torch.Tensor) else {f"out {i}": out for i, out in enumerate(made)}

    def differentiate(
        self,
        arguments: Mapping[str, Any],
        implementation: str = "",
        layout: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.contiguous,
    ) -> dict[str, torch.Tensor]:
        """Its results, and the gradients by argument for a random upstream gradient that `layout` arranges."""
        leaves = {name: arguments[name].detach().requires_grad_() for name in self.leaves}
        results = self.run({**arguments, **leaves}, implementation)
        return {**results, **gradients(results, leaves, layout)}

    def wanted(self, arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """What `differentiate` should give, in fp64."""
        if self.oracle is None:
            return self.run(arguments, "reference")
        leaves = {name: arguments[name].detach().double().requires_grad_() for name in self.leaves}
        # the sum joins what no row reached to the result, so that its gradient is zeros
        joined = sum(leaf.sum() for leaf in leaves.values())
        results = {"out": self.oracle(**{**arguments, **leaves}) + 0 * joined}
        return {**results, **gradients(results, leaves, torch.Tensor.contiguous)}


def gradients(results, leaves, layout):
    if not leaves:
        return {}
    out = results["out"]
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    upstream = layout(upstream.to(out.device, out.dtype))
    made = torch.autograd.grad(out, list(leaves.values()), upstream, materialize_grads=True)
    return {f"d {name}": grad for name, grad in zip(leaves, made, strict=True)}


def touched(rows: str, routing: Routing, token: int) -> list[int]:
    """The rows of a tensor that a token has to do with."""
    k = routing.top_k
    slots = list(range(token * k, token * k + k))
    if rows == "token":
        return [token]
    if rows == "slot":
        return slots
    if rows == "sorted":
        return sorted(routing.inverse[slots].tolist())
    return sorted(set(routing.top_k_index[token].tolist()))


def experts_arguments(draw: Draw, d: int = 6, inner: int = 5) -> dict[str, Any]:
    return {
        "hidden_states": draw(draw.tokens, d),
        "gate_up_proj": draw(draw.experts, 2 * inner, d, by=d**-0.5),
        "down_proj": draw(draw.experts, d, inner, by=inner**-0.5),
        "top_k_index": draw.index,
        "top_k_weights": draw(draw.tokens, draw.top_k),
    }


def latent_arguments(draw: Draw, d: int = 6, r: int = 16, f: int = 5) -> dict[str, Any]:
    return {
        "hidden_states": draw(draw.tokens, d),
        "gate_up_proj": draw(draw.experts, 2 * r, d, by=d**-0.5),
        "scale": draw(draw.experts, 2 * r),
        "v": draw(draw.experts, f, r, by=r**-0.5),
        "top_k_index": draw.index,
        "top_k_weights": draw(draw.tokens, draw.top_k),
        "residual": draw(draw.tokens, -(-f // 16) * 16),
    }


def grouped_arguments(second: str, *, moved: bool) -> Callable[[Draw], dict[str, Any]]:
    def make(draw: Draw) -> dict[str, Any]:
        rows = draw.tokens * draw.top_k
        a = draw(draw.tokens if moved else rows, 6)
        other = draw(draw.experts, 6, 5) if second == "b" else draw(rows, 5)
        return {"a": a, second: other, "routing": draw.routing(), "gather": moved, "scatter": moved}

    return make


def valid_rows(routing: Routing) -> list[tuple[int, int, int]]:
    """(sorted row, slot, expert) of every row that has an expert."""
    experts = routing.top_k_index.flatten().tolist()
    rows = ((row, slot, experts[slot]) for row, slot in enumerate(routing.order.tolist()))
    return [each for each in rows if 0 <= each[2] < routing.num_experts]


def grouped_mm_oracle(a, b, routing, gather, scatter):
    made = {}
    for row, slot, expert in valid_rows(routing):
        made[slot if scatter else row] = a[slot // routing.top_k if gather else row] @ b[expert]
    zero = b.new_zeros(b.shape[2])
    rows = [made.get(row, zero) for row in range(routing.order.numel())]
    return torch.stack(rows) if rows else b.new_zeros(0, b.shape[2])


def grouped_wgrad_oracle(a, g, routing, gather, scatter):
    made = [a.new_zeros(a.shape[1], g.shape[1]) for _ in range(routing.num_experts)]
    for row, slot, expert in valid_rows(routing):
        left = a[slot // routing.top_k if gather else row]
        made[expert] = made[expert] + torch.outer(left, g[slot if scatter else row])
    return torch.stack(made)


def rows_of_muon(draw: Draw, *names: str) -> dict[str, Any]:
    return {name: draw(3, 4, 9, by=1 / 3) for name in names}


BANKS = {"gate_up_proj": "expert", "top_k_weights": "token", "out": "token"}
OPS = [
    Op(
        "route", route, lambda draw: {"top_k_index": draw.index, "num_experts": draw.experts},
        implementations=("reference", "triton"), free=frozenset({("top_k_index", 0), ("top_k_index", 1)}),
        counted=False,
    ),
    Op(
        "latent_glu_experts", latent_glu_experts, latent_arguments, oracle.latent_glu_experts,
        ("reference", "padded", "triton"),
        {"hidden_states": "token", "scale": "expert", "v": "expert", "residual": "token", **BANKS},
        # 4 columns and 5 are both padded to 16
        free=frozenset({("v", 1)}),
    ),
    Op(
        "glu_experts", glu_experts, experts_arguments, oracle.glu_experts, ("reference", "padded", "triton"),
        {"hidden_states": "token", "down_proj": "expert", **BANKS},
    ),
    *(
        Op(
            f"grouped_mm{' moved' if moved else ''}", grouped_mm, grouped_arguments("b", moved=moved),
            grouped_mm_oracle, ("reference", "triton"),
            {"a": "token" if moved else "sorted", "b": "expert", "out": "slot" if moved else "sorted"},
            free=frozenset({("b", 2)}),
        )
        for moved in (False, True)
    ),
    *(
        Op(
            f"grouped_wgrad{' moved' if moved else ''}", grouped_wgrad, grouped_arguments("g", moved=moved),
            grouped_wgrad_oracle, ("reference", "triton"),
            {"a": "token" if moved else "sorted", "g": "slot" if moved else "sorted", "out": "expert"},
            free=frozenset({("a", 1), ("g", 1)}),
        )
        for moved in (False, True)
    ),
]  # fmt: skip
ROUTED = [op for op in OPS if op.rows]
any_rows = frozenset({("x", -1)})
OPS += [
    Op("split_master", muon.split_master, lambda draw: {"master": draw(3, 4)},
       free=frozenset({("master", -1), ("master", 0)})),
    Op("join_master", muon.join_master,
       lambda draw: dict(zip(("high", "low"), muon.split_master(draw(3, 4)), strict=True))),
    Op("orthogonalize", muon.orthogonalize, lambda draw: rows_of_muon(draw, "x"), free=any_rows),
    Op("retract", muon.retract, lambda draw: rows_of_muon(draw, "x"), free=any_rows),
    Op("orthonormality_error", muon.orthonormality_error, lambda draw: rows_of_muon(draw, "x"), free=any_rows),
    Op("muon_factor_step", muon.muon_factor_step,
       lambda draw: {**rows_of_muon(draw, "master", "grad", "momentum"), "lr": 0.1}),
]  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an `op` runs for every row of the table, with a `routed` for those of the expert passes.

    With an `implementation` too it runs for each of theirs.
    """
    for name, table in (("op", OPS), ("routed", ROUTED)):
        if name not in metafunc.fixturenames:
            continue
        if "implementation" in metafunc.fixturenames:
            pairs = [(op, implementation) for op in table for implementation in op.implementations]
            ids = [f"{op.name} {implementation}".strip() for op, implementation in pairs]
            metafunc.parametrize((name, "implementation"), pairs, ids=ids)
        else:
            metafunc.parametrize(name, table, ids=[op.name for op in table])


@pytest.fixture(scope="session")
def table() -> list[Op]:
    """Every row."""
    return OPS


@pytest.fixture(scope="session")
def rows_of_token() -> Callable[[str, Routing, int], list[int]]:
    """`touched`."""
    return touched
