"""The experts of Hugging Face models on these kernels: `register()`, then `experts_implementation="dormouse"`."""

from __future__ import annotations

from typing import Any

import torch

from dormouse_kernels.moe.grouped.op import grouped_mm
from dormouse_kernels.moe.op import glu_experts
from dormouse_kernels.moe.routing import Routing, route

__all__ = ["register"]

NAME = "dormouse"
OLDEST = "5.17"
"""The oldest transformers that is accepted; before its pull request 45577 models refused a foreign name."""


def register() -> None:
    """Makes `experts_implementation="dormouse"` valid for every model of transformers whose experts can be chosen.

    It adds one entry to transformers' own table (`transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS`) for the
    process; calling it again changes nothing. Models are then made or switched as for any other name: a configuration
    with `experts_implementation="dormouse"`, `model.set_experts_implementation("dormouse")`.
    Errors: `ImportError` where transformers is missing or older than 5.17.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "register: transformers is not installed; install the extra: pip install 'dormouse-kernels[transformers]'"
        ) from error
    # comes with transformers
    from packaging.version import Version

    if Version(transformers.__version__) < Version(OLDEST):
        raise ImportError(
            f"register: transformers is {transformers.__version__}, which may take no experts function but its own; "
            f"install transformers>={OLDEST}"
        )
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def experts_forward(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What an experts module of transformers computes: [T, D] from hidden_states [T, D], index and weights [T, k].

    `experts`: the module, which holds `gate_up_proj` and `down_proj` and says how they lie. SwiGLU experts in the
    layout of `glu_experts` are one call of it. All others, those with biases, transposed or ungated weights or a gate
    of their own, are two `grouped_mm` around the module's own gate. An index of E, an expert of another rank, gives
    zeros. The result has hidden_states' dtype.
    """
    if _is_swiglu(experts):
        out = glu_experts(hidden_states, experts.gate_up_proj, experts.down_proj, top_k_index, top_k_weights)
        return out.to(hidden_states.dtype)
    routing = route(top_k_index, experts.num_experts)
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    rows = grouped_mm(hidden_states, _bank(experts, name), routing, gather=True)
    rows = _add_bias(rows, experts, name, routing)
    rows = experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)
    rows = _add_bias(grouped_mm(rows, _bank(experts, "down_proj"), routing), experts, "down_proj", routing)
    if getattr(experts, "has_post_expert_norm", False):
        rows = experts.post_expert_norm(rows)
    weights = top_k_weights.reshape(-1).index_select(0, routing.order)
    # masked, not multiplied by a weight of zero: what a foreign gate makes of a sentinel's row need not be finite
    sentinel = (routing.experts == experts.num_experts).unsqueeze(1)
    rows = (rows * weights.unsqueeze(1)).masked_fill(sentinel, 0)
    slots = rows.index_select(0, routing.inverse).view(*top_k_index.shape, hidden_states.shape[1])
    return slots.sum(dim=1).to(hidden_states.dtype)


def _is_swiglu(experts: Any) -> bool:
    """Whether a module's experts are those of `glu_experts`: gate rows then up rows, SiLU, nothing else."""
    from transformers.activations import SiLUActivation

    if not experts.has_gate or not experts.is_concatenated or experts.is_transposed or experts.has_bias:
        return False
    # the gate that transformers gives to a class without one of its own
    if type(experts)._apply_gate.__module__ != "transformers.integrations.moe":
        return False
    silu = isinstance(experts.act_fn, torch.nn.SiLU | SiLUActivation)
    return silu and not getattr(experts, "has_post_expert_norm", False)


def _bank(experts: Any, name: str) -> torch.Tensor:
    """[E, K, N], as `grouped_mm` multiplies by."""
    weight = getattr(experts, name)
    return weight if experts.is_transposed else weight.mT


def _add_bias(rows: torch.Tensor, experts: Any, name: str, routing: Routing) -> torch.Tensor:
    if not experts.has_bias:
        return rows
    return rows + getattr(experts, f"{name}_bias").index_select(0, routing.experts.clamp(max=experts.num_experts - 1))
