"""One optimizer update: forward and backward of each micro-batch, the norm, the check, the clip, the update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from dormouse_model.loss import bits_per_byte
from torch import Tensor

from dormouse_train.optim.schedule import rate
from dormouse_train.segments import add_gradients

if TYPE_CHECKING:
    from dormouse_model import Dormouse

    from dormouse_train.config import Config
    from dormouse_train.data.batches import Batches
    from dormouse_train.optim.optimizer import Optimizer
    from dormouse_train.segments import Carried


@dataclass(frozen=True)
class StepResult:
    """What a step measured. `loss` (nats, balance loss included) and `train_bpb` are before the update."""

    loss: float
    train_bpb: float
    grad_norm: float
    """Global norm before the clip, tables apart."""
    skipped: bool
    expert_counts: Tensor
    """[L, E] int64: rows an expert got, over all micro-batches."""


def train_step(
    model: Dormouse,
    optimizer: Optimizer,
    batches: Batches,
    step: int,
    config: Config,
    device: torch.device,
    carried: Carried | None = None,
) -> StepResult:
    """Update `model` once on the rows of `step` (counted from 0), or leave all as it was if anything is not finite.

    The loss is cross-entropy + `balance_loss_coef` * balance loss, averaged over `train.accumulate` micro-batches: the
    cross-entropy equals that of one batch of all the rows to rounding, the balance loss is a mean of micro-batches'.
    bf16 autocast on CUDA, fp32 on a CPU. Gradients of tables, which are sparse, have a norm and a clip of their own.
    Where the loss or one of the two norms is infinite or NaN no parameter and no optimizer state changes; clipping
    alone would not save them, as 0 * inf is NaN.

    `carried` has the states that the step begins with and takes those that it ends with; a step that is skipped makes
    it forget them, as what was not finite may be in them.
    """
    for parameter in model.parameters():
        parameter.grad = None
        # Micro-batches and segments are summed in fp32: a bf16 sum would lose what the later ones add.
        summed = config.train.accumulate * config.train.segments > 1
        parameter.grad_dtype = torch.float32 if summed else parameter.dtype
    cross_entropy, loss, counts = _gradients(model, batches, step, config, device, carried)
    dense, tables = _dense_and_tables(model)
    norm, table_norm = global_norm(dense), global_norm(tables)
    finite = math.isfinite(loss) and math.isfinite(norm) and math.isfinite(table_norm)
    if finite:
        torch._foreach_mul_(dense, clip_coefficient(norm, config.train.clip))
        for table in tables:
            table.mul_(clip_coefficient(table_norm, config.train.clip))
        optimizer.step(rate(step, config.train))
    elif carried is not None:
        carried.forget()
    return StepResult(loss, bits_per_byte(cross_entropy), norm, not finite, counts)


def _dense_and_tables(model: Dormouse) -> tuple[list[Tensor], list[Tensor]]:
    """The dense gradients, and of each table the sum a row that was read: both to be changed in place."""
    dense, tables = [], []
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            tables.append(parameter.grad.values())
        else:
            dense.append(parameter.grad)
    return dense, tables


def _gradients(
    model: Dormouse, batches: Batches, step: int, config: Config, device: torch.device, carried: Carried | None
) -> tuple[float, float, Tensor]:
    """Add the step's gradients to `.grad`; mean cross-entropy and loss in nats, and the summed expert counts."""
    accumulate = config.train.accumulate
    cross_entropy, loss, counts = (
        torch.zeros((), device=device),
        torch.zeros((), device=device),
        torch.zeros((), dtype=torch.int64),
    )
    for micro in range(accumulate):
        rows = torch.from_numpy(batches.at(step, micro, accumulate)).to(device)
        carries = config.train.carry != "reset"
        begins = batches.begins(step, micro, accumulate) if carries else []
        before = None if carried is None else carried.before(micro)
        sums, after = add_gradients(model, rows, begins, before, config)
        if carried is not None and after is not None:
            carried.after(micro, after)
        cross_entropy += sums.cross_entropy / accumulate
        loss += sums.loss / accumulate
        counts = counts.to(device) + sums.expert_counts
    return float(cross_entropy), float(loss), counts


def global_norm(tensors: list[Tensor]) -> float:
    """`sqrt(sum of squares)` of all numbers, in fp64: a gradient of 1e20 has a norm where fp32 squares overflow."""
    if not tensors:
        return 0.0
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    return float(torch.linalg.vector_norm(torch.stack(norms)))


def clip_coefficient(norm: float, clip: float) -> float:
    """`min(1, clip / norm)`: what brings a finite `norm` down to `clip`.

    Errors: `ValueError` for a `clip` that is not positive, which would turn gradients around.
    """
    if not clip > 0:
        raise ValueError(f"clip_coefficient: clip is {clip}; give a positive bound")
    return min(1.0, clip / norm) if norm > 0 else 1.0
