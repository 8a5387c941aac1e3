"""The optimizer: closed forms, what must not move, and that loading keeps addresses."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dormouse_kernels import muon
from dormouse_model import Dormouse
from dormouse_train.config import Config, load_config
from dormouse_train.optim.optimizer import Optimizer
from torch import Tensor

TINY = str(Path(__file__).parent / "tiny.toml")
BANK = "block.experts.gate_up_proj"
DOWN = "block.experts.down.weight"
TABLES = "block.memory.engram.tables"
WIDTH = 37


def build(*sets: str) -> tuple[Dormouse, Optimizer, Config]:
    config = load_config(TINY, sets)
    model = Dormouse(config.architecture, seed=1)
    return model, Optimizer(model, config.optim, config.train.lr), config


def draw_gradients(model: Dormouse, seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    """Gaussian gradients in every `.grad`, zero in pad columns and sparse as the model's own are; returned by name."""
    source = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        p.grad = (torch.randn(p.shape, generator=source) * scale).to(p.dtype)
        if name == DOWN:
            p.grad[:, WIDTH:] = 0
        elif name == TABLES:
            p.grad = p.grad.to_sparse(1)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def everything(model: Dormouse, optimizer: Optimizer) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in (model.state_dict() | optimizer.state_dict()).items()}


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("name", [BANK, "block.memory.weight", DOWN])
def test_momentum_is_the_closed_form_of_all_gradients(name: str, nesterov: bool) -> None:
    model, optimizer, _ = build(f"optim.nesterov={str(nesterov).lower()}", "optim.momentum=0.8")
    expected = 0.0
    for step in range(4):
        grad = draw_gradients(model, step)[name].float()
        expected = expected + 0.2 * 0.8 ** (3 - step) * (grad[:, :WIDTH] if name == DOWN else grad)
        optimizer.step(1.0)
    momentum = optimizer.state_dict()[f"momentum.{name}"]
    assert momentum.dtype == torch.float32
    # An orthogonalization that wrote into its input would leave singular values of 1 here.
    torch.testing.assert_close(momentum, expected, rtol=1e-5, atol=1e-6)


def test_a_dense_matrix_moves_by_the_rate_along_the_polar_factor_and_decays() -> None:
    model, optimizer, _ = build("train.lr=0.5", "optim.muon_lr=0.2", "optim.weight_decay=0.3", "optim.nesterov=false")
    name = "block.memory.weight"
    before = model.get_parameter(name).detach().clone()
    grad = draw_gradients(model, 0)[name]
    optimizer.step(0.5)
    rate = 0.5 * 0.5 * 0.2
    u, _, vh = torch.linalg.svd(grad)
    update = (before * (1 - rate * 0.3) - model.get_parameter(name).detach()) / rate
    # Newton-Schulz brings singular values to within 0.1 of 1, but for the smallest of a square Gaussian.
    assert float((update - u @ vh).norm() / (u @ vh).norm()) < 0.15
    torch.testing.assert_close(update, muon.orthogonalize(grad), rtol=1e-3, atol=1e-4)


def test_a_tall_matrix_is_scaled_by_the_root_of_its_shape_and_a_wide_one_is_not() -> None:
    model, optimizer, _ = build("optim.nesterov=false")
    tall, wide = "block.kda.o_proj.weight", "block.kda.q_proj.weight"
    assert model.get_parameter(tall).shape == (24, 16)
    assert model.get_parameter(wide).shape == (16, 24)
    before = {name: model.get_parameter(name).detach().clone() for name in (tall, wide)}
    draw_gradients(model, 0)
    optimizer.step(1.0)
    norms = {name: float((model.get_parameter(name).detach() - before[name]).norm()) for name in before}
    assert norms[tall] == pytest.approx(0.02 * (16 * 24 / 16) ** 0.5, rel=0.1)
    assert norms[wide] == pytest.approx(0.02 * 16**0.5, rel=0.1)


def test_batching_by_shape_gives_what_one_matrix_at_a_time_gives() -> None:
    together, optimizer, _ = build()
    alone, other, _ = build()
    other._by_shape = [[name] for names in other._by_shape for name in names]
    assert len(other._by_shape) > len(optimizer._by_shape)
    for model, opt in ((together, optimizer), (alone, other)):
        draw_gradients(model, 3)
        opt.step(1.0)
    for name, value in together.state_dict().items():
        torch.testing.assert_close(value, alone.state_dict()[name], rtol=1e-5, atol=1e-6, msg=name)


def test_an_update_does_not_depend_on_the_gradients_scale() -> None:
    moved = []
    for scale in (2.0**-40, 1.0, 2.0**20):  # powers of two, so that a bf16 gradient is the same one, scaled
        model, optimizer, _ = build()
        before = everything(model, optimizer) | {f.name: f.master() for f in model.factors()}
        draw_gradients(model, 5, scale)
        optimizer.step(1.0)
        after = everything(model, optimizer) | {f.name: f.master() for f in model.factors()}
        muons = [name.removeprefix("momentum.") for name in after if name.startswith("momentum.")]
        moved.append({name: after[name] - before[name] for name in muons})
    assert len(moved[1]) == 13
    for name, middle in moved[1].items():
        for other in (moved[0], moved[2]):
            assert float((other[name] - middle).norm() / middle.norm()) < 1e-3, name


def test_muon_is_not_sgd_every_direction_of_a_skewed_gradient_moves_alike() -> None:
    model, optimizer, _ = build("optim.nesterov=false")
    name = "readout.weight"
    before = model.get_parameter(name).detach().clone()
    draw_gradients(model, 0)
    u, _, vh = torch.linalg.svd(torch.randn(24, 24, generator=torch.Generator().manual_seed(1)))
    model.get_parameter(name).grad = u @ torch.diag(torch.logspace(0, -1.5, 24)) @ vh
    optimizer.step(1.0)
    moved = torch.linalg.svdvals(model.get_parameter(name).detach() - before) / 0.02
    assert float(moved.min()) > 0.85
    assert float(moved.max()) < 1.15


def test_experts_without_a_gradient_keep_parameters_and_momentum_while_others_move() -> None:
    model, optimizer, _ = build()
    draw_gradients(model, 0)
    optimizer.step(1.0)
    before = everything(model, optimizer)
    draw_gradients(model, 1)
    for factor in model.factors():
        if "shared" not in factor.name:
            assert factor.high.grad is not None
            factor.high.grad[[1, 3]] = 0
    optimizer.step(1.0)
    after = everything(model, optimizer)
    for factor in (f for f in model.factors() if "shared" not in f.name):
        for name in (factor.name, f"{factor.name}_low", f"momentum.{factor.name}"):
            same = [torch.equal(before[name][e], after[name][e]) for e in range(5)]
            assert same == [False, True, False, True, False], name


def test_dense_experts_move_by_the_rate_gate_and_up_apart_and_rest_without_a_gradient() -> None:
    model, optimizer, _ = build("experts.kind=dense", "optim.nesterov=false", "optim.weight_decay=0.1")
    name = "block.experts.swiglu.gate_up_proj"
    draw_gradients(model, 0)
    optimizer.step(1.0)
    before = everything(model, optimizer)
    draw_gradients(model, 1)
    grad = model.get_parameter(name).grad
    assert grad is not None
    width = grad.shape[1] // 2
    grad[[1, 3]], grad[2, :width] = 0, 0
    optimizer.step(1.0)
    after = everything(model, optimizer)
    moved = (after[name] - before[name]).unflatten(1, (2, width))
    assert [[bool(half.any()) for half in expert] for expert in moved] == [
        *([True, True], [False, False], [False, True], [False, False], [True, True])
    ]
    kept = [torch.equal(before[f"momentum.{name}"][e], after[f"momentum.{name}"][e]) for e in range(5)]
    assert kept == [False, True, False, True, False]
    # Singular values of the update are those of a polar factor, for each matrix by itself.
    values = torch.linalg.svdvals(moved[[0, 4]].flatten(0, 1)) / (0.02 * max(1.0, width / 24) ** 0.5)
    assert float((values - 1).abs().median()) < 0.1


def test_half_an_expert_without_a_gradient_rests_alone() -> None:
    model, optimizer, _ = build()
    draw_gradients(model, 0)
    optimizer.step(1.0)
    before = everything(model, optimizer)[BANK]
    draw_gradients(model, 1)
    bank = model.get_parameter(BANK)
    assert bank.grad is not None
    bank.grad[2, :4] = 0
    optimizer.step(1.0)
    assert torch.equal(before[2, :4], bank.detach()[2, :4])
    assert not torch.equal(before[2, 4:], bank.detach()[2, 4:])


def test_pad_columns_stay_exactly_zero_and_outside_of_muon() -> None:
    model, optimizer, _ = build("optim.weight_decay=0.1")
    down = model.get_parameter(DOWN)
    assert down.shape == (24, 48)
    for step in range(5):
        draw_gradients(model, step)
        assert down.grad is not None
        down.grad[:, WIDTH:] = 7.0  # whatever a kernel might leave there
        optimizer.step(1.0)
    assert torch.equal(down.detach()[:, WIDTH:], torch.zeros(24, 11))
    assert optimizer.state_dict()[f"momentum.{DOWN}"].shape == (24, WIDTH)


@pytest.mark.parametrize(("retract", "bound"), [("step", 1e-5), ("never", None)])
def test_factors_are_orthonormal_after_fifty_steps_if_and_only_if_they_are_retracted(retract, bound) -> None:
    model, optimizer, _ = build(f"optim.retract={retract}", "train.lr=0.05")
    for step in range(50):
        draw_gradients(model, step)
        optimizer.step(1.0)
    for factor in model.factors():
        error = float(muon.orthonormality_error(factor.rows(factor.master())).max())
        assert error <= bound if bound else error > 1e-2, (factor.name, error)


def test_a_rate_below_a_bf16_step_still_moves_the_master() -> None:
    model, optimizer, _ = build("train.lr=1e-5")
    factor = model.factors()[0]
    before, high = factor.master(), factor.high.detach().clone()
    for step in range(3):
        draw_gradients(model, step)
        optimizer.step(1.0)
    moved = (factor.master() - before).norm() / before.norm()
    assert 1e-6 < float(moved) < 1e-4
    # The planted variant, updating the bank itself, would have lost almost all of it.
    assert float((factor.high.detach() != high).float().mean()) < 0.05


def test_the_rate_of_a_factor_is_an_angle() -> None:
    model, optimizer, _ = build("train.lr=0.1", "optim.nesterov=false")
    factor = next(f for f in model.factors() if f.name == "block.experts.shared.v")
    before = factor.rows(factor.master())
    draw_gradients(model, 0)
    optimizer.step(1.0)
    after = factor.rows(factor.master())
    # Principal angles between the old and the new span: at most the rate, and near it in most directions.
    cosines = torch.linalg.svdvals(before @ after.mT).clamp(max=1)
    assert float(torch.arccos(cosines).max()) < 0.12
    assert float(torch.arccos(cosines).median()) > 0.05


def test_adamw_matches_torchs_own_on_the_same_gradients() -> None:
    model, optimizer, _ = build()
    twin = {n: p.detach().clone().requires_grad_() for n, p in optimizer._named("adamw").items()}
    other = torch.optim.AdamW(list(twin.values()), lr=0.02 * 0.15 * 0.5, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(3):
        grads = draw_gradients(model, step)
        for name, p in twin.items():
            p.grad = grads[name]
        optimizer.step(0.5)
        other.step()
    for name, p in twin.items():
        torch.testing.assert_close(model.get_parameter(name), p, rtol=1e-5, atol=1e-7, msg=name)


def test_a_rate_of_zero_moves_nothing() -> None:
    model, optimizer, _ = build("optim.weight_decay=0.1")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    draw_gradients(model, 0)
    optimizer.step(0.0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name], rtol=0, atol=1e-6, msg=name)


def test_parameters_without_a_gradient_are_left_alone() -> None:
    model, optimizer, _ = build("optim.weight_decay=0.1")
    before = everything(model, optimizer)
    optimizer.step(1.0)
    for name, value in everything(model, optimizer).items():
        assert torch.equal(value, before[name]), name


def test_a_load_copies_into_the_same_addresses_and_then_steps_alike() -> None:
    model, optimizer, _ = build()
    for step in range(3):
        draw_gradients(model, step)
        optimizer.step(1.0)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    fresh, other, _ = build()
    fresh.load_state_dict(weights)
    addresses = {name: t.data_ptr() for name, t in other.state_dict().items()}
    other.load_state_dict(saved)
    assert {name: t.data_ptr() for name, t in other.state_dict().items()} == addresses
    for m, o in ((model, optimizer), (fresh, other)):
        draw_gradients(m, 9)
        o.step(0.7)
    for name, value in everything(model, optimizer).items():
        assert torch.equal(value, everything(fresh, other)[name]), name


@pytest.mark.parametrize("change", ["missing", "extra", "shape"])
def test_a_state_that_does_not_fit_is_refused_before_anything_is_copied(change: str) -> None:
    _, optimizer, _ = build()
    state = {name: torch.ones_like(t) for name, t in optimizer.state_dict().items()}
    name = f"momentum.{DOWN}"
    if change == "missing":
        del state[name]
    elif change == "extra":
        name = "momentum.other"
        state[name] = torch.zeros(1)
    else:
        state[name] = state[name][:, :-1]
    with pytest.raises(ValueError, match=f"'{name}'"):
        optimizer.load_state_dict(state)
    assert all(not t.any() for t in optimizer.state_dict().values())


def test_the_table_counts_every_number_once() -> None:
    model, optimizer, config = build("optim.weight_decay=0.1")
    rows = optimizer.table()
    assert sum(row.numbers for row in rows) == sum(p.numel() for p in model.parameters())
    by_name = {row.group: row for row in rows}
    assert by_name["factors"].rate == config.train.lr * config.optim.muon_lr
    assert by_name["head"].rate == config.train.lr * config.optim.adam_lr
    assert (by_name["tables"].rate, by_name["tables"].decay) == (5 * by_name["head"].rate, 0.0)
    assert (by_name["factors"].decay, by_name["dense"].decay, by_name["head"].decay) == (0.0, 0.1, 0.0)


def test_a_model_whose_factors_no_rule_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Dormouse(load_config(TINY).architecture)
    monkeypatch.setattr(model, "factors", lambda: Dormouse.factors(model)[:-1])
    with pytest.raises(ValueError, match="factors"):
        Optimizer(model, load_config(TINY).optim, 0.02)


def test_neither_building_nor_stepping_imports_torchs_compiler() -> None:
    # torch.optim's classes do, which costs seconds of two cores before the first step of every run.
    script = (
        "import sys, torch; from pathlib import Path; from dormouse_model import Dormouse\n"
        "from dormouse_train.config import load_config; from dormouse_train.optim.optimizer import Optimizer\n"
        f"config = load_config({TINY!r}); model = Dormouse(config.architecture)\n"
        "optimizer = Optimizer(model, config.optim, config.train.lr)\n"
        "model(torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward(); optimizer.step(1.0)\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
