"""The tensors of one expert pass: the same for a seed, whatever arm runs on them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from dormouse_bench.moe.shapes import Shape


@dataclass(frozen=True, eq=False)
class Problem:
    """One pass's arguments; every floating one is a leaf that wants a gradient. None: not of this shape."""

    shape: Shape
    hidden_states: torch.Tensor
    """[T, d]."""
    gate_up_proj: torch.Tensor
    """[E, 2r, d], gate rows then up rows."""
    scale: torch.Tensor | None
    """[E, 2r] fp32; SwiGLU experts have none."""
    down: torch.Tensor
    """[E, f, r]: V, or the down projection."""
    top_k_index: torch.Tensor
    """[T, k] int64."""
    top_k_weights: torch.Tensor
    """[T, k] fp32."""
    shared_gate_up: torch.Tensor | None = None
    """[2·shared_rank, d]."""
    shared_v: torch.Tensor | None = None
    """[f, shared_rank]."""
    w_down: torch.Tensor | None = None
    """[d, width]: f_pad wide with zero columns from f on, or f wide for arms that pad nothing."""

    def leaves(self) -> dict[str, torch.Tensor]:
        """What a backward gives gradients of, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, torch.Tensor) and value.requires_grad}

    def counts(self) -> torch.Tensor:
        """[E] rows of each expert."""
        return self.top_k_index.flatten().bincount(minlength=self.shape.experts)

    def dropped(self, capacity: int | None) -> float:
        """Share of the rows that a capacity refuses."""
        if capacity is None:
            return 0.0
        return ((self.counts() - capacity).clamp(min=0).sum() / self.shape.rows).item()

    def unpadded(self) -> Problem:
        """The same with W_down [d, f], as a model without padding holds it."""
        if self.w_down is None:
            return self
        return replace(self, w_down=_leaf(self.w_down.detach()[:, : self.shape.f]))

    def to(self, dtype: torch.dtype) -> Problem:
        """Copies of `dtype`, leaves of their own."""
        return replace(self, **{name: _leaf(tensor.detach().to(dtype)) for name, tensor in self.leaves().items()})


def make(
    shape: Shape, dtype: torch.dtype, device: str, *, seed: int = 0, trained: torch.Tensor | None = None
) -> Problem:
    """Normal activations and banks, softmax weights; routing of the shape's kind. `trained` [T, k] for "trained"."""
    source = torch.Generator(device).manual_seed(seed)

    def normal(*sizes: int, std: float = 1.0, kind: torch.dtype = dtype) -> torch.Tensor:
        # in pieces: fp32 noise for a whole bf16 bank at once is twice the bank
        out = torch.empty(sizes, dtype=kind, device=device)
        for part in out.view(-1, sizes[-1]).split(1 << 16):
            part.copy_(torch.randn(part.shape, generator=source, device=device).mul_(std))
        return out.requires_grad_()

    t, d, r, f, e, k = shape.tokens, shape.d, shape.r, shape.f, shape.experts, shape.k
    latent = shape.op == "latent_glu_experts"
    index = indices(shape, device, seed=seed, trained=trained)
    weights = torch.randn(t, k, generator=source, device=device).softmax(-1)
    problem = Problem(
        shape=shape,
        hidden_states=normal(t, d),
        gate_up_proj=normal(e, 2 * r, d, std=d**-0.5),
        scale=_leaf(1 + 0.1 * torch.randn(e, 2 * r, generator=source, device=device)) if latent else None,
        down=normal(e, f, r, std=r**-0.5),
        top_k_index=index,
        top_k_weights=_leaf(weights),
    )
    if not shape.shared_rank:
        return problem
    w_down = torch.zeros(d, shape.f_pad, dtype=dtype, device=device)
    w_down[:, :f] = normal(d, f, std=f**-0.5).detach()
    return replace(
        problem,
        shared_gate_up=normal(2 * shape.shared_rank, d, std=d**-0.5),
        shared_v=normal(f, shape.shared_rank, std=shape.shared_rank**-0.5),
        w_down=_leaf(w_down),
    )


def indices(shape: Shape, device: str, *, seed: int = 0, trained: torch.Tensor | None = None) -> torch.Tensor:
    """[T, k] int64, the k experts of a token all different.

    "uniform": every expert as likely; "zipf": the n-th liked expert 1/n as often as the first, in shuffled order;
    "trained": the given indices, of a router that was trained.
    """
    source = torch.Generator(device).manual_seed(seed + 1)
    t, e, k = shape.tokens, shape.experts, shape.k
    if shape.routing == "trained":
        if trained is None:
            raise ValueError("indices: routing is 'trained' but no indices are given; pass --trained FILE")
        return _checked(trained, shape).to(device)
    likely = torch.ones(e, device=device)
    if shape.routing == "zipf":
        order = torch.randperm(e, generator=source, device=device)
        likely[order] = 1 / torch.arange(1, e + 1, device=device, dtype=torch.float32)
    # the k largest of log p + Gumbel noise are k draws without replacement
    noise = torch.rand(t, e, generator=source, device=device).clamp_(min=1e-20).log_().neg_().log_().neg_()
    return (likely.log() + noise).topk(k, dim=-1).indices


def read_indices(path: Path) -> torch.Tensor:
    """The tensor in a file that `torch.save` wrote: a router's choices, [T, k]. Errors: `ValueError`, naming it."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a pickle that is none raises many kinds
        raise ValueError(f"--trained {path} cannot be read ({error}); pass a tensor saved by torch.save") from error
    if not isinstance(found, torch.Tensor):
        raise ValueError(f"--trained {path} holds a {type(found).__name__}; pass one tensor of indices [T, k]")
    return found


def _checked(found: torch.Tensor, shape: Shape) -> torch.Tensor:
    fits = found.dim() == 2 and found.shape[0] >= shape.tokens and found.shape[1] == shape.k
    if not fits or found.is_floating_point() or int(found.min()) < 0 or int(found.max()) >= shape.experts:
        raise ValueError(
            f"--trained holds {found.dtype} {tuple(found.shape)}; pass whole numbers [T, k] with T of at least "
            f"{shape.tokens}, k {shape.k}, from 0 to {shape.experts - 1}"
        )
    return found[: shape.tokens].to(torch.int64)


def _leaf(values: torch.Tensor) -> torch.Tensor:
    return values.detach().contiguous().clone().requires_grad_()
