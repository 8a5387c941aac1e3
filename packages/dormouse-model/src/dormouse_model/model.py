"""Dormouse: bytes in, logits of the next byte out, one block applied L times.

    x = Embedding(bytes);  h = x
    for i < L:  h = block(h, x, e_i, alpha);  out = out + W_o h
    logits = W_head RMSNorm(out)

Letters: `B` sequences, `T` bytes, `d` model, `E` experts, `L` iterations.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dormouse_model import init
from dormouse_model.block import Block
from dormouse_model.config import ModelConfig
from dormouse_model.factors import Factor
from dormouse_model.norm import RMSNorm
from dormouse_model.state import IterationState, KDAState, SDPAState, State
from dormouse_model.swiglu_experts import SwiGLUExperts

VOCABULARY = 256
BYTES = (torch.uint8, torch.int16, torch.int32, torch.int64)
"""Dtypes of ids: int8 and bool hold no byte above 127."""


class Output(NamedTuple):
    """`logits` [B, T, 256] fp32; `balance_loss` [], a mean over iterations; `expert_counts` [L, E] int64; `state`."""

    logits: Tensor
    balance_loss: Tensor
    expert_counts: Tensor
    state: State | None


class Dormouse(nn.Module):
    """A byte-level language model. Initial values depend on `seed` and each parameter's name alone.

    On the meta device parameters have shapes and no values.
    """

    def __init__(self, config: ModelConfig, *, seed: int = 0, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.config = config
        width = config.model.d_model
        self.embedding = nn.Embedding(
            VOCABULARY, width, device=device, _weight=torch.empty(VOCABULARY, width, device=device)
        )
        self.iteration_embedding = nn.Parameter(torch.empty(config.model.iterations, width, device=device))
        self.alpha = nn.Parameter(torch.empty((), device=device))
        self.block = Block(config, device=device)
        self.readout = nn.Linear(width, width, bias=False, device=device)
        self.norm = RMSNorm(width, device=device)
        self.head = nn.Linear(width, VOCABULARY, bias=False, device=device)
        self.register_load_state_dict_pre_hook(_refuse_another_kind)
        if self.alpha.device.type != "meta":
            init.initialize(self, seed)

    def forward(self, ids: Tensor, state: State | None = None, *, return_state: bool = False) -> Output:
        """Logits of the byte after each of `ids` [B, T] uint8 or int64, continuing from `state` where one is given.

        Errors: `ValueError` where `ids` is empty, not two-dimensional or of a dtype that holds no bytes, or the state
        is of another batch or model.
        """
        self._check(ids, state)
        x = self.embedding(ids.long())
        hidden, total = x, None
        recall, last_bytes = self.block.memory.recall(ids, None if state is None else state.last_bytes)
        losses, counts, after = [], [], []
        for i, embedding in enumerate(self.iteration_embedding.unbind(0)):
            # Iteration i continues iteration i of the bytes before, never iteration i-1 of these.
            before = None if state is None else state.iterations[i]
            hidden, loss, count, next_state = self.block(hidden, x, embedding, self.alpha, recall, before)
            # The readout is linear: one product of the sum is the sum of the products.
            total = hidden if total is None else total + hidden
            losses.append(loss)
            counts.append(count)
            after.append(next_state)
        normed = self.norm(self.readout(total))
        with torch.autocast(normed.device.type, enabled=False):
            logits = F.linear(normed.to(self.head.weight.dtype), self.head.weight)
        new_state = State(tuple(after), last_bytes) if return_state else None
        return Output(logits, torch.stack(losses).mean(), torch.stack(counts), new_state)

    def autocast(self) -> torch.autocast:
        """The context that the forward pass is meant to run in: bf16 on CUDA, the parameters' own dtype elsewhere."""
        device = self.embedding.weight.device.type
        return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")

    def init_state(self, batch_size: int, device: torch.device | str | None = None) -> State:
        """The state before the first byte of `batch_size` sequences: zeros."""
        model, like = self.config.model, self.embedding.weight
        device = like.device if device is None else torch.device(device)
        recurrent = (batch_size, model.num_heads, model.head_dim, model.head_dim)
        tails = (batch_size, self.config.kda.conv_size - 1, 3 * self.config.inner)
        last = torch.zeros(tails, device=device, dtype=like.dtype)
        if model.mixer == "sdpa":
            none = torch.zeros(batch_size, 0, model.num_heads, model.head_dim, device=device, dtype=like.dtype)
            zero = SDPAState(none, none, torch.zeros(batch_size, 0, device=device, dtype=torch.bool), last)
        else:
            wide = torch.promote_types(like.dtype, torch.float32)
            zero = KDAState(torch.zeros(recurrent, device=device, dtype=wide), last)
        engram = self.block.memory.engram
        if engram is None:
            return State((IterationState(zero),) * model.iterations)
        tail = torch.zeros(batch_size, engram.config.conv_size - 1, model.d_model, device=device, dtype=like.dtype)
        return State((IterationState(zero, tail),) * model.iterations, engram.no_bytes(batch_size, device))

    def factors(self) -> list[Factor]:
        """The expert factors with their split masters, routed then shared; ask again after moving the model.

        None where the experts are dense.
        """
        experts = self.block.experts
        if isinstance(experts, SwiGLUExperts):
            return []
        return experts.factors("block.experts.") + experts.shared.factors("block.experts.shared.")

    def _check(self, ids: Tensor, state: State | None) -> None:
        if ids.dim() != 2 or ids.dtype not in BYTES:
            raise ValueError(
                f"Dormouse: ids must be integers of shape [B, T], got {ids.dtype} {tuple(ids.shape)}; "
                "pass bytes with a batch dimension"
            )
        if ids.numel() == 0:
            raise ValueError(f"Dormouse: ids holds no byte; pass at least one for each of {ids.shape[0]} sequences")
        if state is None:
            return
        if len(state.iterations) != self.config.model.iterations or state.batch_size != ids.shape[0]:
            raise ValueError(
                f"Dormouse: state is of {len(state.iterations)} iterations and batch {state.batch_size}, the call of "
                f"{self.config.model.iterations} and {ids.shape[0]}; make one with init_state({ids.shape[0]})"
            )
        if (state.last_bytes is None) == self.config.engram.enabled:
            one = "without" if self.config.engram.enabled else "with"
            raise ValueError(f"Dormouse: state is of a model {one} Engram; make one with init_state({ids.shape[0]})")
        # how far softmax attention has seen is no property of the model
        fixed = slice(2, None) if self.config.model.mixer == "sdpa" else slice(1, None)
        held, wanted = (
            [tuple(t.shape[fixed]) for t in each.tensors()] for each in (state, self.init_state(ids.shape[0], "meta"))
        )
        if held != wanted:
            raise ValueError(
                f"Dormouse: state holds tensors of {held} a sequence, this model's of {wanted}; make one with "
                f"init_state({ids.shape[0]})"
            )


_KINDS = {
    "model.mixer": {"kda": "block.kda.o_proj.weight", "sdpa": "block.sdpa.o_proj.weight"},
    "experts.kind": {"tsct": "block.experts.gate_up_proj", "dense": "block.experts.swiglu.gate_up_proj"},
}
"""A parameter that tells what a model's weights are of."""


def another_kind(model: Dormouse, names: Collection[str]) -> str | None:
    """Why weights of these names cannot be `model`'s: of which other mixer or experts they are; None where they may."""
    held = dict(model.named_parameters())
    for key, kinds in _KINDS.items():
        own = next(kind for kind, name in kinds.items() if name in held)
        for kind, name in kinds.items():
            if kind != own and name in names:
                return f"these weights are of {key} '{kind}' and this model is of '{own}', which is another function"
    return None


def _refuse_another_kind(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
    """Also where missing keys are allowed: a model that kept its own attention would go on as if it had been loaded."""
    assert isinstance(module, Dormouse)
    names = {name.removeprefix(prefix) for name in state_dict}
    if (reason := another_kind(module, names)) is not None:
        raise RuntimeError(f"Dormouse: {reason}; build the model with the kind that the weights are of")
