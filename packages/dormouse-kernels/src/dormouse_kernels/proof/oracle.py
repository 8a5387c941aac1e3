"""The expert passes written as slowly and plainly as they can be, for other code to be compared with.

No routing, no grouping, no hand-written backward: a loop over tokens and choices in fp64, gradients by autograd.
"""

from __future__ import annotations

import torch


def latent_glu_experts(
    hidden_states: torch.Tensor,
    gate_up_proj: torch.Tensor,
    scale: torch.Tensor,
    v: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    residual: torch.Tensor | None = None,
    capacity: int | None = None,
) -> torch.Tensor:
    """What `dormouse_kernels.latent_glu_experts` computes, in fp64: the same shapes, [T, f_pad]."""
    f = v.shape[1]
    out = _experts(hidden_states, gate_up_proj, scale, v, top_k_index, top_k_weights, capacity)
    out = out if residual is None else out + residual.double()[:, :f]
    return torch.nn.functional.pad(out, (0, -f % 16))


def glu_experts(
    hidden_states: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    capacity: int | None = None,
) -> torch.Tensor:
    """What `dormouse_kernels.glu_experts` computes, in fp64: the same shapes, [T, D]."""
    return _experts(hidden_states, gate_up_proj, None, down_proj, top_k_index, top_k_weights, capacity)


def _experts(
    hidden_states: torch.Tensor,
    gate_up_proj: torch.Tensor,
    scale: torch.Tensor | None,
    down: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    capacity: int | None,
) -> torch.Tensor:
    # upcast whole, so that a low-precision argument's gradient is summed in fp64 and rounded once
    hidden_states, gate_up_proj, down = hidden_states.double(), gate_up_proj.double(), down.double()
    scale = None if scale is None else scale.double()
    top_k_weights = top_k_weights.double()
    taken = [0] * down.shape[0]
    tokens = []
    for token, experts in enumerate(top_k_index.tolist()):
        total = hidden_states.new_zeros(down.shape[1])
        for choice, expert in enumerate(experts):
            if not 0 <= expert < down.shape[0]:
                continue
            taken[expert] += 1
            if capacity is not None and taken[expert] > capacity:
                continue
            latents = gate_up_proj[expert] @ hidden_states[token]
            latents = latents if scale is None else latents * scale[expert]
            gate, up = latents.chunk(2)
            z = torch.nn.functional.silu(gate) * up
            total = total + top_k_weights[token, choice] * (down[expert] @ z)
        tokens.append(total)
    return torch.stack(tokens) if tokens else hidden_states.new_zeros(0, down.shape[1])
