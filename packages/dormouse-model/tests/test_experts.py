from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from dormouse_kernels import Counters
from dormouse_kernels.moe.selection import AUTO, IMPLEMENTATIONS
from dormouse_model import Dormouse, ModelConfig
from dormouse_model.config import read_config, validate
from dormouse_model.experts import Experts
from torch import Tensor
from torch.utils.checkpoint import checkpoint


@pytest.fixture
def experts(tiny: Dormouse) -> Experts:
    assert isinstance(tiny.block.experts, Experts)
    return tiny.block.experts


def rows(count: int = 13, width: int = 24) -> Tensor:
    """Rows of RMS 1, as the block's norm makes them."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(2))


def glu(u: Tensor, scale: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """One expert by its formula."""
    p, q = (u @ x * scale).chunk(2)
    return v @ (F.silu(p) * q)


def test_the_module_is_its_formula(experts):
    """Row by row, expert by expert, in fp64."""
    experts = experts.double()
    x = rows().double()
    choice = experts.router(x)
    want = []
    for t in range(len(x)):
        h = glu(experts.shared.gate_up_proj, experts.shared.scale, experts.shared.v, x[t])
        for e, w in zip(choice.top_k_index[t], choice.top_k_weights[t], strict=True):
            h = h + w * glu(experts.gate_up_proj[e], experts.scale[e], experts.v[e], x[t])
        want.append(experts.down.weight[:, :37] @ h)
    got, _, counts = experts(x)
    torch.testing.assert_close(got, torch.stack(want))
    assert counts.tolist() == torch.bincount(choice.top_k_index.flatten(), minlength=5).tolist()


def test_pad_columns_are_zero_get_no_gradient_and_no_checkpoint_shows_them(tiny):
    weight = tiny.block.experts.down.weight
    assert weight.shape == (24, 48)
    tiny(torch.randint(0, 256, (2, 9))).logits.square().sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad[:, 37:], torch.zeros(24, 11))
    assert bool((weight.grad[:, :37] != 0).any())
    saved = tiny.state_dict()["block.experts.down.weight"]
    assert saved.shape == (24, 37)
    assert saved.is_contiguous()


def test_a_checkpoint_without_pad_columns_loads_into_a_padded_model(tiny, tiny_config):
    other = Dormouse(tiny_config(), seed=1)
    with torch.no_grad():
        other.get_parameter("block.experts.down.weight")[:, 37:] = 9.0
    other.load_state_dict(tiny.state_dict())
    assert torch.equal(other.get_parameter("block.experts.down.weight"), tiny.block.experts.down.weight)


def test_a_checkpoint_of_another_width_is_refused(tiny, tiny_config):
    with pytest.raises(RuntimeError, match=r"block\.experts\.down\.weight"):
        Dormouse(tiny_config(d_ffn=40)).load_state_dict(tiny.state_dict())


@pytest.mark.parametrize(
    "shape",
    [
        {"d_model": 192, "num_experts": 16, "rank": 16, "shared_rank": 32, "d_ffn": 512},
        {"d_model": 256, "num_experts": 32, "rank": 8, "shared_rank": 24, "d_ffn": 683},
        {"d_model": 256, "num_experts": 32, "rank": 8, "shared_rank": 24, "d_ffn": 683, "top_k": 4},
    ],
    ids=["nano-like", "b1-like", "top-4"],
)
def test_the_shared_and_the_routed_experts_start_with_comparable_strength(shape, tiny_config):
    experts = Dormouse(tiny_config(**shape)).block.experts
    assert isinstance(experts, Experts)
    x = rows(512, shape["d_model"])
    with torch.no_grad():
        shared = experts.shared(x)[:, : shape["d_ffn"]]
        hidden: list[Tensor] = []
        experts.down.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
        experts(x)
        routed = hidden[0][:, : shape["d_ffn"]] - shared
    ratio = float(routed.square().mean().sqrt() / shared.square().mean().sqrt())
    assert 0.4 < ratio < 2.0
    assert 0.3 < float(shared.square().mean().sqrt()) < 1.2


@pytest.mark.parametrize("implementation", ["reference", "padded"])
def test_swapping_the_implementation_changes_no_parameter_and_no_loss(implementation, tiny_config, bytes_of, enliven):
    auto = enliven(Dormouse(tiny_config()))
    swapped = enliven(Dormouse(tiny_config(implementation=implementation)))
    assert [(n, p.shape) for n, p in auto.named_parameters()] == [(n, p.shape) for n, p in swapped.named_parameters()]
    ids = bytes_of(2, 21)
    with Counters() as counters:
        outputs = [model(ids) for model in (auto, swapped)]
    assert counters.snapshot()[f"moe.latent_glu_experts/forward/{implementation}"] >= 2
    torch.testing.assert_close(outputs[0].logits, outputs[1].logits, rtol=1e-5, atol=1e-5)
    for output in outputs:
        output.logits.square().mean().backward()
    for (name, one), other in zip(auto.named_parameters(), swapped.parameters(), strict=True):
        assert one.grad is not None, name
        assert other.grad is not None, name
        torch.testing.assert_close(one.grad.float(), other.grad.float(), rtol=2e-2, atol=1e-4, msg=name)


def test_capacity_drops_the_same_rows_in_both_implementations(tiny_config, bytes_of, enliven):
    ids = bytes_of(2, 21)
    logits, dropped = [], []
    for implementation in ("reference", "padded"):
        model = enliven(Dormouse(tiny_config(implementation=implementation, capacity=9)))
        with Counters() as counters:
            logits.append(model(ids).logits)
        dropped.append(counters.snapshot()["moe.latent_glu_experts/forward/dropped"])
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)
    assert dropped[0] == dropped[1] > 0
    assert not torch.allclose(logits[0], enliven(Dormouse(tiny_config()))(ids).logits, atol=1e-3)


def test_every_row_is_counted_at_its_expert_in_every_iteration(tiny_config, bytes_of):
    counts = Dormouse(tiny_config(iterations=3))(bytes_of(2, 21)).expert_counts
    assert counts.shape == (3, 5)
    assert counts.dtype == torch.int64
    assert counts.sum(-1).tolist() == [2 * 2 * 21] * 3


def test_recomputing_an_iteration_routes_alike_and_counts_apart(tiny, bytes_of):
    """Gradients with and without activation checkpointing are the same bits."""
    ids = bytes_of(2, 21)

    def gradients() -> list[Tensor]:
        tiny.zero_grad()
        tiny(ids).logits.square().mean().backward()
        return [p.grad.clone() for p in tiny.parameters() if p.grad is not None]

    plain = gradients()
    forward: Callable = tiny.block.forward
    with Counters() as counters:

        def contexts() -> tuple:
            return counters.phase("forward"), counters.phase("recompute")

        def recomputed(*arguments: object) -> object:
            return checkpoint(forward, *arguments, use_reentrant=False, context_fn=contexts)

        tiny.block.forward = recomputed
        assert all(map(torch.equal, plain, gradients()))
    snapshot = counters.snapshot()
    for site, name in (("kda", "bounded"), ("moe.latent_glu_experts", "reference")):
        assert snapshot[f"{site}/forward/{name}"] == snapshot[f"{site}/recompute/{name}"] == 2


def test_a_configuration_may_name_every_implementation_of_the_expert_pass(tiny_config):
    for implementation in (AUTO, *IMPLEMENTATIONS):
        assert tiny_config(implementation=implementation).experts.implementation == implementation


def test_the_named_configuration_holds_the_ratio_of_ffn_to_model():
    tables = read_config("nano")
    config = validate(ModelConfig, tables)
    assert config.experts.d_ffn == 8 * config.model.d_model // 3
