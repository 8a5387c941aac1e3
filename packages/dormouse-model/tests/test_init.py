from __future__ import annotations

import math

import pytest
import torch
from dormouse_model import Dormouse
from dormouse_model.init import generator, orthonormal_rows
from dormouse_model.loss import bits_per_byte, next_byte_loss


def test_a_stream_is_decided_by_seed_and_name_alone():
    def first(seed: int, name: str) -> float:
        return float(torch.rand((), generator=generator(seed, name)))

    assert first(0, "a") == first(0, "a")
    assert len({first(0, "a"), first(1, "a"), first(0, "b"), first(10, "a")}) == 4
    torch.manual_seed(3)
    assert first(0, "a") == first(0, "a")


def test_the_stream_of_a_name_is_the_same_on_every_machine():
    assert generator(0, "head.weight").initial_seed() == 2769572589763772722


def test_another_shape_elsewhere_moves_no_parameter(tiny_config):
    one = dict(Dormouse(tiny_config()).named_parameters())
    other = dict(Dormouse(tiny_config(num_experts=9, shared_rank=3, iterations=4)).named_parameters())
    alike = [name for name in one if one[name].shape == other[name].shape]
    assert len(alike) > 20
    assert all(torch.equal(one[name], other[name]) for name in alike)


def test_the_same_seed_gives_the_same_model_and_another_seed_another(tiny_config):
    torch.manual_seed(1)
    one = Dormouse(tiny_config(), seed=5).state_dict()
    torch.manual_seed(2)
    two, three = Dormouse(tiny_config(), seed=5).state_dict(), Dormouse(tiny_config(), seed=6).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["embedding.weight"], three["embedding.weight"])
    assert not torch.equal(one["block.experts.v_low"], three["block.experts.v_low"])


def test_the_first_loss_is_near_eight_bits_and_every_branch_is_open(tiny_config, bytes_of):
    model = Dormouse(tiny_config(d_model=96, head_dim=32, d_ffn=256, rank=8))
    ids = bytes_of(4, 65)
    output = model(ids[:, :-1])
    assert abs(bits_per_byte(float(next_byte_loss(output.logits, ids[:, 1:]).detach())) - 8) < 0.2
    assert model.alpha.item() == 1.0
    strengths: dict[str, float] = {}

    def keep(module: torch.nn.Module, _: object, out: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        out = out[0] if isinstance(out, tuple) else out
        strengths[type(module).__name__] = float(out.detach().square().mean().sqrt())

    for module in (model.block.kda, model.block.memory, model.block.experts):
        module.register_forward_hook(keep)
    model(ids[:, :-1])
    assert set(strengths) == {"KDA", "Memory", "Experts"}
    assert all(0.1 < strength < 3 for strength in strengths.values()), strengths


def test_decays_start_with_half_lives_from_bytes_to_tens_of_bytes(tiny_config):
    """FLA's own bias with A_log = 0; its other default would start saturated, with half-lives of 1e13."""
    kda = Dormouse(tiny_config(d_model=256, num_heads=8, head_dim=32)).block.kda
    assert torch.equal(kda.A_log, torch.zeros(8))
    half_lives = math.log(2) / (5 * kda.dt_bias.detach().sigmoid())
    low, median, high = (float(torch.quantile(half_lives, q)) for q in (0.1, 0.5, 0.9))
    assert 1 < low < 4 < median < 30 < high < 200


def test_orthonormal_rows_are_uniform_and_refuse_the_impossible():
    rows = orthonormal_rows(torch.Size((200, 2, 3)), generator(0, "x"))
    torch.testing.assert_close(rows @ rows.mT, torch.eye(2).expand(200, 2, 2), rtol=0, atol=1e-5)
    # LAPACK's own signs would make the first entry of one sign throughout.
    assert 60 < int((rows[:, 0, 0] > 0).sum()) < 140
    with pytest.raises(ValueError, match="3 rows cannot be orthonormal in 2 dimensions; lower the rank"):
        orthonormal_rows(torch.Size((3, 2)), generator(0, "x"))


def test_the_meta_device_has_shapes_and_no_values(tiny_config):
    model = Dormouse(tiny_config(), device="meta")
    assert all(p.is_meta for p in [*model.parameters(), *model.buffers()])
    assert {n: p.shape for n, p in model.named_parameters()} == {
        n: p.shape for n, p in Dormouse(tiny_config()).named_parameters()
    }
