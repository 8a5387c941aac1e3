"""One update of every parameter: Muon on factors and dense matrices, sparse Adam on tables, AdamW on the rest.

All optimizer state is fp32 and allocated once; loading copies into it, so that addresses stay what they were.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from dormouse_kernels import muon
from torch import Tensor, nn
from torch.optim.adamw import adamw

from dormouse_train.optim.groups import Group, Method, assign
from dormouse_train.optim.sparse import sparse_adam_

if TYPE_CHECKING:
    from dormouse_model import Dormouse
    from dormouse_model.factors import Factor

    from dormouse_train.config import OptimSection


@dataclass(frozen=True)
class Row:
    """One line of the printed table of groups; `rate` is the peak."""

    group: str
    method: Method
    tensors: int
    numbers: int
    rate: float
    decay: float


@dataclass(frozen=True)
class Moments:
    """Adam's state of one parameter: how often it was updated, and the two averages."""

    updates: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @staticmethod
    def zeros(parameter: nn.Parameter) -> Moments:
        """The state before the first update."""
        count = torch.zeros((), device=parameter.device)
        return Moments(count, torch.zeros_like(parameter), torch.zeros_like(parameter))


class Optimizer:
    """`Optimizer(model, config.optim, config.train.lr).step(lr_scale)` updates `model` in place from its `.grad`.

    The model is asked for sparse gradients of its tables.

    Factors: Muon in the rows convention with the rate as an angle in radians; the fp32 master is joined from its two
    halves, updated, retracted and split again. An item (one expert's U, U' or V) whose gradient is exactly zero keeps
    its parameters and its momentum: an expert that no byte chose must not walk on along stale momentum.
    Dense matrices: Muon, batched by shape, `m = beta m + (1 - beta) g`, the orthogonalized update times
    `sqrt(max(1, rows / columns))`, decoupled decay. Pad columns are outside the matrix that is seen, and stay zero.
    Experts' dense matrices are batched as they are and rest as factors do.
    Tables: sparse Adam, on the rows that the step read. The rest: AdamW. A group's rate is `lr_scale * lr` times
    `optim.muon_lr`, `optim.adam_lr`, or for tables `optim.adam_lr * optim.table_lr`.
    """

    def __init__(self, model: Dormouse, optim: OptimSection, lr: float) -> None:
        self.optim = optim
        muon_lr, adam_lr = lr * optim.muon_lr, lr * optim.adam_lr
        self.peak = {"factor": muon_lr, "muon": muon_lr, "adamw": adam_lr, "sparse": adam_lr * optim.table_lr}
        self.groups = assign(model.named_parameters())
        self._widths = {"block.experts.down.weight": model.config.experts.d_ffn}
        self._factors = _matching(model.factors(), self._named("factor"))
        self._dense = self._named("muon")
        self._decays = {name: self._decay(group) for group in self.groups for name in group.parameters}
        self._momentum = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in self._named("factor").items()}
        self._momentum |= {
            name: torch.zeros_like(self._seen(name, p), dtype=torch.float32).contiguous()
            for name, p in self._dense.items()
        }
        self._by_shape = _by_shape({name: self._seen(name, p) for name, p in self._dense.items()})
        device = next(model.parameters()).device
        self._rates = {method: torch.zeros((), device=device) for method in self.peak}
        self._tables = self._named("sparse")
        if model.block.memory.engram is not None:
            model.block.memory.engram.sparse_grad = True
        self._moments = {name: Moments.zeros(p) for name, p in (self._named("adamw") | self._tables).items()}

    def _named(self, method: Method) -> dict[str, nn.Parameter]:
        return {name: p for group in self.groups if group.rule.method == method for name, p in group.parameters.items()}

    def _seen(self, name: str, tensor: Tensor) -> Tensor:
        """The dense matrices [..., rows, columns] of a parameter: without pad columns, gate and up projection apart."""
        if name.endswith(".gate_up_proj"):
            return tensor.unflatten(-2, (2, tensor.shape[-2] // 2))
        return tensor[:, : self._widths[name]] if name in self._widths else tensor

    def _decay(self, group: Group) -> float:
        return self.optim.weight_decay if group.rule.decays else 0.0

    def table(self) -> list[Row]:
        """The groups as they are printed."""
        return [
            Row(g.rule.name, g.rule.method, len(g.parameters), g.numbers, self.peak[g.rule.method], self._decay(g))
            for g in self.groups
        ]

    def set_rates(self, lr_scale: float) -> None:
        """The one place where rates change: every method's rate becomes `lr_scale` times its peak."""
        for method, rate in self._rates.items():
            rate.fill_(lr_scale * self.peak[method])

    @torch.no_grad()
    def step(self, lr_scale: float) -> None:
        """Update every parameter that has a gradient. The gradients are read, not cleared."""
        self.set_rates(lr_scale)
        for factor in self._factors:
            self._step_factor(factor)
        for names in self._by_shape:
            self._step_dense([name for name in names if self._dense[name].grad is not None])
        for name in self._tables:
            self._step_table(name)
        for group in self.groups:
            if group.rule.method == "adamw":
                self._step_adamw(group)

    def _step_factor(self, factor: Factor) -> None:
        if factor.high.grad is None:
            return
        grad = factor.rows(factor.high.grad.float())
        momentum = self._momentum[factor.name]
        master, moved = muon.muon_factor_step(
            factor.rows(factor.master()),
            grad,
            factor.rows(momentum),
            lr=self._rates["factor"],
            beta=self.optim.momentum,
            nesterov=self.optim.nesterov,
            steps=self.optim.newton_schulz_steps,
            retract=self.optim.retract,
            active=(grad != 0).flatten(-2).any(-1),
        )
        factor.set_master(factor.unrows(master))
        momentum.copy_(factor.unrows(moved))

    def _step_dense(self, names: list[str]) -> None:
        if not names:
            return
        beta = self.optim.momentum
        updates = []
        for name in names:
            grad, momentum = self._seen(name, _grad(self._dense[name])).float(), self._momentum[name]
            moved = momentum.lerp(grad, 1 - beta)
            update = grad.lerp(moved, beta) if self.optim.nesterov else moved
            if grad.dim() > 2:
                rests = (grad == 0).flatten(-2).all(-1)[..., None, None]
                moved, update = torch.where(rests, momentum, moved), update.masked_fill(rests, 0)
            momentum.copy_(moved)
            updates.append(update)
        stacked = torch.stack(updates)
        rows, columns = stacked.shape[-2:]
        tall = rows > columns
        orthogonal = muon.orthogonalize(stacked.mT if tall else stacked, steps=self.optim.newton_schulz_steps)
        orthogonal = (orthogonal.mT if tall else orthogonal) * max(1.0, rows / columns) ** 0.5
        rate = self._rates["muon"]
        for name, update in zip(names, orthogonal.unbind(0), strict=True):
            seen = self._seen(name, self._dense[name])
            seen.mul_(1 - rate * self._decays[name]).sub_(update * rate)

    def _step_table(self, name: str) -> None:
        table = self._tables[name]
        if table.grad is None:
            return
        moments = self._moments[name]
        sparse_adam_(
            table,
            table.grad,
            moments.exp_avg,
            moments.exp_avg_sq,
            moments.updates,
            rate=self._rates["sparse"],
            betas=self.optim.betas,
            eps=self.optim.eps,
        )

    def _step_adamw(self, group: Group) -> None:
        """Torch's own AdamW as a function: its class imports the compiler, seconds of every start."""
        named = {name: p for name, p in group.parameters.items() if p.grad is not None}
        moments = [self._moments[name] for name in named]
        adamw(
            list(named.values()),
            [_grad(p) for p in named.values()],
            [m.exp_avg for m in moments],
            [m.exp_avg_sq for m in moments],
            [],
            [m.updates for m in moments],
            fused=True,
            amsgrad=False,
            beta1=self.optim.betas[0],
            beta2=self.optim.betas[1],
            lr=self._rates["adamw"],
            weight_decay=self._decay(group),
            eps=self.optim.eps,
            maximize=False,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """`momentum.NAME`; `updates.NAME` (Adam's count of steps), `exp_avg.NAME`, `exp_avg_sq.NAME`; live tensors."""
        state = {f"momentum.{name}": tensor for name, tensor in self._momentum.items()}
        for name, moments in self._moments.items():
            state |= {f"{key}.{name}": tensor for key, tensor in vars(moments).items()}
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Copy `state_dict` into the tensors that exist; nothing is copied unless every name and shape fits."""
        held = self.state_dict()
        wrong = sorted(held.keys() ^ state_dict.keys()) or [n for n in held if held[n].shape != state_dict[n].shape]
        if wrong:
            raise ValueError(
                f"Optimizer: the saved state does not fit this model: {len(wrong)} tensors differ, the first "
                f"is '{wrong[0]}'; resume with the configuration that the state was saved with"
            )
        for name, tensor in held.items():
            tensor.copy_(state_dict[name])


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _matching(factors: list[Factor], claimed: dict[str, nn.Parameter]) -> list[Factor]:
    """`factors`, if they are exactly the parameters that the factor group claimed."""
    if {factor.name for factor in factors} != set(claimed):
        raise ValueError(
            f"Optimizer: the model's factors {sorted(f.name for f in factors)} and the group's parameters "
            f"{sorted(claimed)} differ; change the rule of the group 'factors'"
        )
    return factors


def _by_shape(tensors: dict[str, Tensor]) -> list[list[str]]:
    names: dict[torch.Size, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        names[tensor.shape].append(name)
    return list(names.values())
