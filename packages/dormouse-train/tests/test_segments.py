"""Segments: what they hand on, what they do not, and the states that one step leaves to the next."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from dormouse_model import Dormouse, State
from dormouse_train import segments
from dormouse_train.checkpoint import Checkpoint
from dormouse_train.config import Config, load_config
from dormouse_train.data import ByteView, open_batches
from dormouse_train.optim.optimizer import Optimizer
from dormouse_train.segments import Carried, add_gradients, cut
from dormouse_train.step import StepResult, train_step
from torch import Tensor

TINY = str(Path(__file__).parent / "tiny.toml")
CPU = torch.device("cpu")
TEXT = np.random.default_rng(0).integers(97, 123, 4000).astype(np.uint8)
BOUND = 2e-5
"""Largest difference of a logit between a row in pieces and the whole, in fp32, for logits of order 1."""


def configured(*sets: str) -> Config:
    """Rows of 128 bytes; without the balance loss, which is one of what is routed together."""
    return load_config(TINY, ["train.seq=128", "experts.balance_loss_coef=0.0", *sets])


def lively(config: Config) -> Dormouse:
    """A model in fp64 whose tables, gates and head say something."""
    model, source = Dormouse(config.architecture, seed=2).double(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name in ("head.weight", "block.controller.weight", "block.memory.engram.tables"):
            held = model.get_parameter(name)
            held.copy_(torch.randn(held.shape, generator=source) * held.shape[-1] ** -0.5)
    return model


def rows_of(batch: int, length: int = 128, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(97, 123, (batch, length + 1), dtype=torch.uint8, generator=source)


def nowhere(batch: int) -> list[np.ndarray]:
    return [np.empty(0, dtype=np.int64)] * batch


def gradients(config: Config, rows: Tensor, state: State | None = None) -> tuple[float, dict[str, Tensor]]:
    model = lively(config)
    sums, _ = add_gradients(model, rows, nowhere(len(rows)), state, config)
    return float(sums.loss), {n: p.grad.to_dense() for n, p in model.named_parameters() if p.grad is not None}


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(
            got[name], value, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_row_in_segments_that_carry_all_has_the_loss_and_gradients_of_the_whole() -> None:
    rows = rows_of(2)
    loss, want = gradients(configured(), rows)
    split, got = gradients(configured("train.segment=64", "train.carry=full"), rows)
    assert split == pytest.approx(loss, rel=1e-12)
    assert_close(got, want)


def test_truncated_segments_have_the_loss_of_the_whole_and_other_gradients() -> None:
    rows = rows_of(2)
    loss, want = gradients(configured(), rows)
    split, got = gradients(configured("train.segment=64", "train.carry=tbptt"), rows)
    assert split == pytest.approx(loss, rel=1e-12)
    off = {name: float((got[name] - value).norm() / value.norm()) for name, value in want.items()}
    assert off["block.kda.v_proj.weight"] > 1e-4


def test_segments_that_carry_nothing_are_rows_of_their_own() -> None:
    rows = rows_of(2)
    loss, got = gradients(configured("train.segment=64"), rows)
    alone = torch.cat([rows[:, :65], rows[:, 64:]])
    want_loss, want = gradients(configured("train.seq=64"), alone)
    assert loss == pytest.approx(want_loss, rel=1e-12)
    assert_close(got, want)
    assert loss != pytest.approx(gradients(configured(), rows)[0], rel=1e-6)


def embedded(model: Dormouse) -> list[Tensor]:
    """What the model reads, a tensor a forward, with gradients."""
    seen: list[Tensor] = []

    def keep(_: object, __: object, out: Tensor) -> None:
        out.retain_grad()
        seen.append(out)

    model.embedding.register_forward_hook(keep)
    return seen


class _Counted:
    """Lives as long as what it stands beside."""


class Saved:
    """Numbers that autograd holds for a backward, and the most that it ever held."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def pack(self, held: Tensor) -> tuple[Tensor, object]:
        numbers, counted = held.numel(), _Counted()
        self.add(numbers)
        weakref.finalize(counted, self.add, -numbers)
        return held, counted

    def add(self, numbers: int) -> None:
        self.now += numbers
        self.most = max(self.most, self.now)


@pytest.mark.parametrize(("carry", "most"), [("reset", 0.35), ("tbptt", 0.35), ("full", 1.2)])
def test_what_is_held_for_a_backward_is_of_a_segment_unless_gradients_pass_it(carry: str, most: float) -> None:
    held = {}
    for name, sets in {"whole": [], "segments": ["train.segment=64", f"train.carry={carry}"]}.items():
        config, saved = configured("train.seq=256", *sets), Saved()
        model = Dormouse(config.architecture)
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda packed: packed[0]):
            add_gradients(model, rows_of(8, 256), nowhere(8), None, config)
        held[name] = saved.most
    print(held)
    assert 0 < held["segments"] < most * held["whole"]
    assert carry != "full" or held["segments"] > 0.8 * held["whole"]


@pytest.mark.parametrize(("carry", "reaches"), [("tbptt", False), ("full", True)])
def test_the_gradient_into_the_segment_before_is_exactly_zero_where_it_is_truncated(
    carry: str, reaches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured("train.segment=64", f"train.carry={carry}")
    model, real, weights = lively(config), segments.next_byte_loss, iter((0.0, 1.0))
    monkeypatch.setattr(segments, "next_byte_loss", lambda *given: real(*given) * next(weights))
    seen = embedded(model)
    add_gradients(model, rows_of(2), nowhere(2), None, config)
    first, second = (each.grad for each in seen)
    assert first is not None
    assert second is not None
    assert bool(first.any()) == reaches
    assert bool((second != 0).any(-1).all())


def test_no_logit_has_a_gradient_of_a_later_byte_on_either_side_of_a_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured("train.segment=64", "train.carry=full")
    model, real, looked = lively(config), segments.next_byte_loss, []
    seen = embedded(model)

    def look(logits: Tensor, targets: Tensor) -> Tensor:
        for t in (0, 1, 31, 62, 63):
            given = torch.autograd.grad(logits[:, t].sum(), seen, retain_graph=True)
            read = torch.cat([g.abs().sum((0, 2)) for g in given])
            at = 64 * (len(seen) - 1) + t
            assert not bool(read[at + 1 :].any())
            assert bool(read[at] > 0)
            assert at < 64 or bool(read[:64].all()), "nothing is read across the boundary"
            looked.append(at)
        return real(logits, targets)

    monkeypatch.setattr(segments, "next_byte_loss", look)
    add_gradients(model, rows_of(1), nowhere(1), None, config)
    assert looked == [0, 1, 31, 62, 63, 64, 65, 95, 126, 127]


def test_a_state_goes_from_an_iteration_to_the_same_one_of_the_next_segment() -> None:
    config = configured("train.segment=64", "train.carry=tbptt")
    model, given, left = lively(config), [], []
    model.block.register_forward_pre_hook(lambda _, inputs: given.append(inputs[-1]))
    model.block.register_forward_hook(lambda _, __, out: left.append(out.state))
    add_gradients(model, rows_of(2), nowhere(2), None, config)
    assert given[:2] == [None, None]
    for i in range(2):
        pointers = [[t.data_ptr() for t in state.tensors()] for state in (given[2 + i], left[i])]
        assert pointers[0] == pointers[1]


def logits_of(model: Dormouse, rows: Tensor, begins: Sequence[Sequence[int]], state: State, config: Config) -> Tensor:
    found: list[Tensor] = []
    hook = model.register_forward_hook(lambda _, __, out: found.append(out.logits.detach()))
    add_gradients(model, rows, [np.array(places, dtype=np.int64) for places in begins], state, config)
    hook.remove()
    return torch.cat(found, 1)


@pytest.mark.parametrize("at", [0, 1, 37, 64, 70, 127])
def test_a_document_makes_its_row_a_fresh_start_and_leaves_the_others(at: int) -> None:
    config = configured("train.segment=64", "train.carry=tbptt", "data.order=stream")
    model, rows = lively(config).float(), rows_of(2)
    with torch.no_grad():
        past = model(rows_of(2, 40, seed=1), return_state=True).state
        assert past is not None
        fresh, whole = model(rows[:1, at:-1]).logits, model(rows[:, :-1], past).logits
    logits = logits_of(model, rows, [[at], []], past, config)
    assert float((logits[:1, at:] - fresh).abs().max()) < BOUND
    assert at == 0 or float((logits[0, :at] - whole[0, :at]).abs().max()) < BOUND
    assert float((logits[1] - whole[1]).abs().max()) < BOUND
    assert float((logits[0, at:] - whole[0, at:]).abs().max()) > 1e-2


def test_a_segment_is_cut_where_a_document_begins_and_nowhere_else() -> None:
    begins = [np.array([0, 70]), np.array([64, 70, 100]), np.array([], dtype=np.int64)]
    pieces = [[(p.start, p.stop, p.begins) for p in segment] for segment in cut(128, 64, begins)]
    assert pieces == [
        [(0, 64, (True, False, False))],
        [(64, 70, (False, True, False)), (70, 100, (True, True, False)), (100, 128, (False, True, False))],
    ]
    assert [[(p.start, p.stop, p.begins) for p in s] for s in cut(128, 128, [])] == [[(0, 128, ())]]


class Training:
    """A model that reads a stream, stepped by hand."""

    def __init__(self, *sets: str, view: ByteView | None = None) -> None:
        self.config = load_config(TINY, ["data.order=stream", "train.carry=tbptt", *sets])
        keys = self.config.train
        self.model = Dormouse(self.config.architecture, seed=2)
        self.optimizer = Optimizer(self.model, self.config.optim, keys.lr)
        self.batches = open_batches(self.config, view or ByteView([TEXT]))
        self.carried = Carried(self.model, keys.batch, keys.accumulate)

    def step(self, step: int) -> StepResult:
        return train_step(self.model, self.optimizer, self.batches, step, self.config, CPU, self.carried)


def test_a_step_goes_on_from_the_state_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    monkeypatch.setattr(training.optimizer, "step", lambda _: None)  # a state is of the weights that it was read with
    training.step(0)
    second = training.step(1)
    rows = torch.from_numpy(np.concatenate([training.batches.at(0)[:, :-1], training.batches.at(1)], 1))
    with torch.no_grad():
        logits = training.model(rows[:, :-1]).logits
    want = segments.next_byte_loss(logits[:, 16:], rows[:, 17:])
    assert second.train_bpb * np.log(2) == pytest.approx(float(want), rel=1e-6)
    assert not any(t.requires_grad for t in training.carried.before(0).tensors())


def test_micro_batches_carry_their_own_rows() -> None:
    whole, parts = Training("train.batch=4"), Training("train.batch=2", "train.accumulate=2")
    for training in (whole, parts):
        training.step(0)
    for one, other in zip(whole.carried.state_dict().items(), parts.carried.state_dict().items(), strict=True):
        assert one[0] == other[0]
        torch.testing.assert_close(one[1], other[1], rtol=1e-4, atol=1e-6)
        assert bool(one[1].any()) == (one[0] != "engram"), "tables begin as zeros"


@pytest.mark.parametrize(("carry", "cut_there"), [("tbptt", True), ("reset", False)])
def test_a_step_cuts_its_rows_at_documents_where_a_state_is_handed_on(carry: str, cut_there: bool) -> None:
    view = ByteView([TEXT[:801]], np.arange(0, 801, 50))
    training = Training(f"train.carry={carry}", view=view)
    lengths: list[int] = []
    training.model.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    for step in range(5):
        lengths.clear()
        training.step(step)
        starts = training.batches.starts(step)
        places = {-start % 50 for start in starts if 0 < -start % 50 < 16}
        edges = [0, *sorted(places), 16] if cut_there else [0, 16]
        assert lengths == np.diff(edges).tolist()


def test_a_row_that_comes_round_starts_anew() -> None:
    training = Training("train.batch=1", view=ByteView([TEXT[:81]]))
    around = next(step for step in range(1, 9) if training.batches.starts(step)[0] < 16)
    for step in range(around):
        training.step(step)
    seen: list[State | None] = []
    training.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    training.step(around)
    (state,) = seen
    assert state is not None
    for held, start in zip(state.tensors(), training.model.init_state(1).tensors(), strict=True):
        assert torch.equal(held, start)


def test_a_step_that_is_skipped_forgets_the_states() -> None:
    training = Training()
    training.step(0)
    handle = training.model.alpha.register_hook(lambda grad: grad * torch.nan)
    assert training.step(1).skipped
    handle.remove()
    for held, start in zip(training.carried.before(0).tensors(), training.model.init_state(2).tensors(), strict=True):
        assert torch.equal(held, start)
    assert not training.step(2).skipped


def test_the_carried_states_are_a_part_of_a_checkpoint_and_keep_their_addresses(tmp_path: Path) -> None:
    trained, other = Training(), Training()
    trained.step(0)
    addresses = [t.data_ptr() for t in other.carried.before(0).tensors()]
    assert len(set(addresses)) == len(addresses)
    Checkpoint(tmp_path).add("carried", trained.carried).save(1)
    Checkpoint(tmp_path).add("carried", other.carried).load()
    for held, loaded in zip(trained.carried.before(0).tensors(), other.carried.before(0).tensors(), strict=True):
        assert torch.equal(held, loaded)
    assert [t.data_ptr() for t in other.carried.before(0).tensors()] == addresses
