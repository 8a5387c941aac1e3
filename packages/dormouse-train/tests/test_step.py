"""One step: accumulation, the clip, and steps that are not finite."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from dormouse_model import Dormouse
from dormouse_train import segments
from dormouse_train.config import Config, load_config
from dormouse_train.data import Batches, ByteView
from dormouse_train.optim.optimizer import Optimizer
from dormouse_train.step import StepResult, clip_coefficient, global_norm, train_step
from torch import Tensor

TINY = str(Path(__file__).parent / "tiny.toml")
TABLES = "block.memory.engram.tables"
CPU = torch.device("cpu")
TEXT = np.random.default_rng(0).integers(97, 123, 4000).astype(np.uint8)


class Training:
    """A model, its optimizer and its batches, stepped by hand."""

    def __init__(self, *sets: str) -> None:
        self.config: Config = load_config(TINY, sets)
        train = self.config.train
        self.model = Dormouse(self.config.architecture, seed=2)
        self.optimizer = Optimizer(self.model, self.config.optim, train.lr)
        self.batches = Batches(ByteView([TEXT]), batch=train.batch, seq=train.seq, seed=0)

    def step(self, step: int) -> StepResult:
        return train_step(self.model, self.optimizer, self.batches, step, self.config, CPU)

    def state(self) -> dict[str, Tensor]:
        return {k: v.clone() for k, v in (self.model.state_dict() | self.optimizer.state_dict()).items()}

    def dense(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None and not p.grad.is_sparse]

    def table_gradient(self) -> Tensor:
        grad = self.model.get_parameter(TABLES).grad
        assert grad is not None
        return grad.coalesce()

    def poison(self, value: float, name: str = "block.experts.scale") -> torch.utils.hooks.RemovableHandle:
        """Make one number of `name`'s gradient `value` until the handle is removed."""

        def replaced(grad: Tensor) -> Tensor:
            grad = grad.coalesce() if grad.is_sparse else grad.clone()
            (grad.values() if grad.is_sparse else grad).view(-1)[3] = value
            return grad

        return self.model.get_parameter(name).register_hook(replaced)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["block.experts.scale", "block.experts.v", TABLES])
def test_a_step_that_is_not_finite_changes_nothing_and_the_next_one_is_as_if_it_had_not_been(value, name) -> None:
    poisoned, clean = Training(), Training()
    for training in (poisoned, clean):
        training.step(0)
    before = poisoned.state()
    handle = poisoned.poison(value, name)
    result = poisoned.step(1)
    handle.remove()
    assert result.skipped
    assert math.isfinite(result.grad_norm) == (name == TABLES)
    assert equal(before, poisoned.state())
    assert not poisoned.step(2).skipped
    clean.step(2)
    assert equal(poisoned.state(), clean.state())


def test_an_infinite_loss_skips_the_step_even_where_its_gradient_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    before = training.state()
    real = segments.next_byte_loss
    monkeypatch.setattr(segments, "next_byte_loss", lambda logits, targets: real(logits, targets) + math.inf)
    result = training.step(0)
    assert math.isfinite(result.grad_norm)
    assert result.skipped
    assert equal(before, training.state())


def test_a_gradient_of_1e20_is_clipped_to_the_bound_and_not_lost() -> None:
    training = Training("train.clip=0.5")
    handle = training.poison(1e20)
    result = training.step(0)
    handle.remove()
    assert not result.skipped
    assert result.grad_norm == pytest.approx(1e20, rel=1e-6)
    assert global_norm(training.dense()) == pytest.approx(0.5, rel=1e-5)
    # The planted variant: squares in fp32 are infinite, and the gradients would all have become zero.
    naive = torch.stack([torch.full((1,), 1e20).square().sum()]).sqrt()
    assert torch.isinf(naive).all()


def test_gradients_below_the_bound_are_left_as_they_are() -> None:
    training = Training("train.clip=1e9")
    result = training.step(0)
    assert result.grad_norm == pytest.approx(global_norm(training.dense()), rel=1e-12)


def test_tables_have_a_norm_and_a_clip_of_their_own() -> None:
    usual, spiked = Training("train.clip=0.001"), Training("train.clip=0.001")
    handle = spiked.poison(1e20, TABLES)
    one, two = usual.step(0), spiked.step(0)
    handle.remove()
    # A spike of the tables leaves the norm and the dense gradients as they were, bit for bit; its own are clipped.
    assert one.grad_norm == two.grad_norm
    assert all(map(torch.equal, usual.dense(), spiked.dense()))
    for training in (usual, spiked):
        assert global_norm([training.table_gradient().values()]) == pytest.approx(0.001, rel=1e-5)


def test_micro_batches_add_up_to_one_update_of_a_row() -> None:
    training = Training("train.accumulate=4")
    before = training.state()[TABLES]
    training.step(0)
    gradient = training.table_gradient()
    rows = gradient.indices()[0]
    assert len(rows) == len(rows.unique())
    assert float(training.state()[f"updates.{TABLES}"]) == 1
    moved = (training.state()[TABLES] != before).any(-1)
    assert set(moved.nonzero().flatten().tolist()) <= set(rows.tolist())
    assert int(moved.sum()) > 20


def test_the_norm_is_of_all_tensors_together_whatever_their_dtype() -> None:
    tensors = [torch.tensor([3.0]), torch.tensor([[4.0]], dtype=torch.bfloat16), torch.zeros(3)]
    assert global_norm(tensors) == 5.0
    assert global_norm([]) == 0.0


def test_clip_coefficients() -> None:
    assert clip_coefficient(4.0, 1.0) == 0.25
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(0.0, 1.0) == 1.0


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan])
def test_a_bound_that_would_turn_gradients_around_is_refused(clip: float) -> None:
    with pytest.raises(ValueError, match="clip is"):
        clip_coefficient(1.0, clip)


def test_accumulation_gives_the_loss_and_the_gradients_of_the_big_batch() -> None:
    # Without the balance loss, which is one a micro-batch.
    whole = Training("train.batch=8", "experts.balance_loss_coef=0.0")
    parts = Training("train.batch=2", "train.accumulate=4", "experts.balance_loss_coef=0.0")
    assert {tuple(row) for i in range(4) for row in parts.batches.at(5, i, 4)} == {
        tuple(row) for row in whole.batches.at(5)
    }
    one, four = whole.step(5), parts.step(5)
    assert four.loss == pytest.approx(one.loss, rel=1e-6)
    assert four.train_bpb == pytest.approx(one.train_bpb, rel=1e-6)
    assert four.grad_norm == pytest.approx(one.grad_norm, rel=1e-2)
    assert torch.equal(four.expert_counts, one.expert_counts)
    for (name, p), q in zip(whole.model.named_parameters(), parts.model.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        # An expert's own gradient is rounded to bf16 in every micro-batch, their sum is not.
        tolerance = 1e-2 if p.dtype == torch.bfloat16 else 1e-4
        assert float((p.grad.to_dense().float() - q.grad.to_dense().float()).norm()) <= tolerance * float(
            p.grad.to_dense().float().norm()
        ), name


def test_micro_batches_of_bf16_banks_are_summed_in_fp32() -> None:
    training = Training("train.accumulate=4")
    training.step(0)
    assert {p.grad.dtype for p in training.model.parameters() if p.grad is not None} == {torch.float32}


def test_the_loss_is_cross_entropy_plus_the_balance_loss_by_its_coefficient() -> None:
    losses = {}
    for coefficient in (0.0, 0.5):
        training = Training(f"experts.balance_loss_coef={coefficient}")
        result = training.step(0)
        losses[coefficient] = result.loss
        assert result.train_bpb * math.log(2) == pytest.approx(losses[0.0], rel=1e-6)
    rows = torch.from_numpy(Training().batches.at(0))
    balance = Training().model(rows[:, :-1]).balance_loss.item()
    assert losses[0.5] - losses[0.0] == pytest.approx(0.5 * balance, rel=1e-4)


def test_targets_are_the_bytes_after_the_inputs() -> None:
    training = Training()
    seen = []
    training.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
    training.step(3)
    assert torch.equal(seen[0], torch.from_numpy(training.batches.at(3))[:, :-1])


def test_expert_counts_cover_every_row_of_every_iteration() -> None:
    training = Training("train.accumulate=3")
    counts = training.step(0).expert_counts
    assert counts.dtype == torch.int64
    assert counts.shape == (2, 5)
    assert counts.sum(-1).tolist() == [3 * 2 * 16 * 2] * 2


def test_the_rate_of_the_step_reaches_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training("train.warmup=4")
    rates: list[float] = []
    monkeypatch.setattr(training.optimizer, "step", rates.append)
    for step in range(3):
        training.step(step)
    assert rates == [0.25, 0.5, 0.75]


@pytest.mark.parametrize(
    "arm", ["engram.enabled=true", "engram.enabled=false", "experts.kind=dense", "model.mixer=sdpa"]
)
def test_a_repeated_text_is_learned(arm: str) -> None:
    training = Training("train.steps=60", "train.batch=8", "train.lr=0.05", arm)
    repeated = np.tile(np.frombuffer(b"abcdefgh", np.uint8), 100)
    training.batches = Batches(ByteView([repeated]), batch=8, seq=16, seed=0)
    losses = [training.step(step).train_bpb for step in range(60)]
    assert losses[0] > 7
    assert losses[-1] < 1.5  # without the byte before, three bits are the least
