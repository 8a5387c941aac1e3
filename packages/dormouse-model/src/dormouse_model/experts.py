"""Two-latent spectral experts (TSCT): factors with orthonormal sides, a free spectrum, and the gate in rank space.

    p = U x    q = U' x    z = silu(p s) (q s')    h = V z    y = W_down ( sum_j w_j h_j + h_shared )

Letters: `T` bytes, `d` model, `E` experts, `k` a byte, `r` rank, `R` the shared expert's rank, `f` ffn width, `f_pad` f
rounded up to 16. Source: spectral compact training, arXiv 2604.00733, with two latents in place of one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from dormouse_kernels import latent_glu_experts, route
from torch import Tensor, nn

from dormouse_model.config import ExpertsSection
from dormouse_model.factors import Factor
from dormouse_model.router import Router, balance_loss


class FactorBank(nn.Module):
    """The factors of `experts` experts, or of one without a leading dimension where `experts` is None.

    Split masters: bf16 Parameters, which the forward pass reads, and int16 buffers with the low halves.
    """

    gate_up_proj_low: Tensor
    v_low: Tensor

    def __init__(
        self, experts: int | None, rank: int, d_model: int, d_ffn: int, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        lead = () if experts is None else (experts,)
        for name, shape in (("gate_up_proj", (*lead, 2 * rank, d_model)), ("v", (*lead, d_ffn, rank))):
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device=device)))
            self.register_buffer(f"{name}_low", torch.zeros(shape, dtype=torch.int16, device=device))
        self.scale = nn.Parameter(torch.empty(*lead, 2 * rank, device=device))

    gate_up_proj: nn.Parameter
    v: nn.Parameter

    def factors(self, prefix: str) -> list[Factor]:
        """The two factor banks, named below `prefix`."""
        return [
            Factor(f"{prefix}gate_up_proj", self.gate_up_proj, self.gate_up_proj_low, "rows"),
            Factor(f"{prefix}v", self.v, self.v_low, "columns"),
        ]


class SharedExpert(FactorBank):
    """The expert every byte goes to: `V (silu(U x s) * (U' x s'))`, rank R."""

    def __init__(self, d_model: int, config: ExpertsSection, *, device: torch.device | str | None = None) -> None:
        super().__init__(None, config.shared_rank, d_model, config.d_ffn, device=device)
        self.padding = config.d_ffn_padded - config.d_ffn

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[T, d]` to `[T, f_pad]`, pad columns zero."""
        dtype = torch.promote_types(hidden_states.dtype, self.v.dtype)
        latents = F.linear(hidden_states.to(dtype), self.gate_up_proj.to(dtype)) * self.scale.to(dtype)
        gate, up = latents.chunk(2, -1)
        return F.linear(F.silu(gate) * up, F.pad(self.v.to(dtype), (0, 0, 0, self.padding)))


class Down(nn.Module):
    """`W_down`, held `[d, f_pad]` so that its rows are aligned; checkpoints hold `[d, f]`.

    The pad columns are zero and stay so: pad columns of the input are zero, hence so are their gradients.
    """

    def __init__(self, d_model: int, config: ExpertsSection, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.d_ffn = config.d_ffn
        self.weight = nn.Parameter(torch.zeros(d_model, config.d_ffn_padded, device=device))
        self.register_state_dict_post_hook(_strip)
        self.register_load_state_dict_pre_hook(_restore)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[T, f_pad]` to `[T, d]`."""
        return F.linear(hidden, self.weight)


def _strip(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, metadata: dict[str, Any]) -> None:
    assert isinstance(module, Down)
    key = f"{prefix}weight"
    # A copy where columns are dropped: safetensors takes no strided views.
    state_dict[key] = state_dict[key][:, : module.d_ffn].contiguous()


def _restore(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
    assert isinstance(module, Down)
    held = state_dict.get(f"{prefix}weight")
    if held is not None and held.shape[-1] == module.d_ffn:
        state_dict[f"{prefix}weight"] = F.pad(held, (0, module.weight.shape[-1] - module.d_ffn))


class Experts(FactorBank):
    """Router, routed experts, shared expert and the one down projection of all."""

    def __init__(self, d_model: int, config: ExpertsSection, *, device: torch.device | str | None = None) -> None:
        super().__init__(config.num_experts, config.rank, d_model, config.d_ffn, device=device)
        self.num_experts = config.num_experts
        self.capacity = config.capacity
        self.implementation = config.implementation
        self.router = Router(d_model, config, device=device)
        self.shared = SharedExpert(d_model, config, device=device)
        self.down = Down(d_model, config, device=device)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[T, d]` to (`[T, d]`, the balance loss `[]`, rows an expert got `[E]` int64)."""
        choice = self.router(hidden_states)
        routing = route(choice.top_k_index, self.num_experts)
        hidden = latent_glu_experts(
            hidden_states,
            self.gate_up_proj,
            self.scale,
            self.v,
            choice.top_k_index,
            choice.top_k_weights,
            routing=routing,
            residual=self.shared(hidden_states),
            capacity=self.capacity,
            implementation=self.implementation,
        )
        return self.down(hidden), balance_loss(choice.probabilities, routing.counts), routing.counts
