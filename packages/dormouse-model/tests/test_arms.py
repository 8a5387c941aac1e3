"""The two arms that are other functions: SwiGLU experts as the control, softmax attention in KDA's place."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from dormouse_kernels import Counters
from dormouse_model import Dormouse, generate, ledger
from dormouse_model.checkpoint import CheckpointError
from dormouse_model.config import ConfigError, ModelConfig, read_config, validate
from dormouse_model.parameter_ledger import dense_difference
from dormouse_model.sdpa import SDPA
from dormouse_model.swiglu_experts import SwiGLUExperts
from dormouse_model.weights import export, install
from torch import Tensor

ARMS = [{"kind": "dense"}, {"mixer": "sdpa"}]


@pytest.fixture(params=ARMS, ids=["dense", "sdpa"])
def arm(request, tiny_config, enliven) -> Dormouse:
    return enliven(Dormouse(tiny_config(**request.param)))


def test_dense_experts_are_their_formula(tiny_config):
    experts = Dormouse(tiny_config(kind="dense")).double().block.experts
    assert isinstance(experts, SwiGLUExperts)
    x = torch.randn(13, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    w, choice = dict(experts.named_parameters()), experts.router(x)

    def network(gate_up: Tensor, down: Tensor, row: Tensor) -> Tensor:
        gate, up = (gate_up @ row).chunk(2)
        return down @ (F.silu(gate) * up)

    want = []
    for t in range(13):
        y = network(w["shared_swiglu.gate_up_proj"], w["shared_swiglu.down_proj"], x[t])
        for e, weight in zip(choice.top_k_index[t], choice.top_k_weights[t], strict=True):
            y = y + weight * network(w["swiglu.gate_up_proj"][e], w["swiglu.down_proj"][e], x[t])
        want.append(y)
    got, _, counts = experts(x)
    torch.testing.assert_close(got, torch.stack(want))
    assert counts.tolist() == torch.bincount(choice.top_k_index.flatten(), minlength=5).tolist()


@pytest.mark.parametrize("implementation", ["reference", "padded"])
def test_dense_experts_run_the_kernels_op_in_every_implementation_alike(implementation, tiny_config, bytes_of):
    one, other = Dormouse(tiny_config(kind="dense")), Dormouse(tiny_config(kind="dense", implementation=implementation))
    with Counters() as counters:
        logits = other(bytes_of(2, 21)).logits
    assert counters.snapshot()[f"moe.glu_experts/forward/{implementation}"] == 2
    torch.testing.assert_close(logits, one(bytes_of(2, 21)).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"d_ffn": 64, "rank": 24, "shared_rank": 24}, {"num_experts": 1, "top_k": 1}])
def test_the_width_is_the_nearest_at_equal_parameters_and_the_difference_is_said(changes, tiny_config):
    config, tsct = tiny_config(kind="dense", **changes), tiny_config(**changes)
    difference = ledger(config)["total"] - ledger(tsct)["total"]
    assert difference == dense_difference(config)
    width, shared = config.experts.swiglu_widths(24)
    assert config.experts.swiglu_parameters(24, width) == ledger(config)["banks"]
    assert shared == max(1, round(width * config.experts.shared_rank / config.experts.rank))
    off = [abs(config.experts.swiglu_parameters(24, w) - config.experts.tsct_parameters(24)) for w in range(1, 200)]
    assert min(off) == abs(difference) == off[width - 1]


def test_the_control_of_nano_has_its_size_within_half_a_percent():
    tables = read_config("nano")
    tables["experts"]["kind"] = "dense"
    config = validate(ModelConfig, tables)
    assert abs(dense_difference(config)) < 0.005 * ledger("nano")["total"]


def test_a_byte_meets_top_k_dense_experts(tiny_config):
    counts = ledger(tiny_config(kind="dense"))
    width, _ = tiny_config().experts.swiglu_widths(24)
    assert counts["active"] == counts["total"] - 255 * 24 - (856 - 3) * 8 - 3 * (3 * 24 * width)


def test_softmax_attention_is_its_formula(tiny_config):
    layer = Dormouse(tiny_config(mixer="sdpa")).double().get_submodule("block.sdpa")
    assert isinstance(layer, SDPA)
    with torch.no_grad():
        layer.gate_up.bias.normal_(generator=torch.Generator().manual_seed(0))
    u = torch.randn(2, 11, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    w = dict(layer.named_parameters())

    def mixed(name: str) -> Tensor:
        projected = F.pad((u @ w[f"{name}_proj.weight"].mT).mT, (3, 0))
        return F.conv1d(projected, w[f"{name}_conv.weight"], groups=24).mT.unflatten(-1, (3, 8)).transpose(1, 2)

    q, k, v = (mixed(name) for name in "qkv")
    scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(11, 11).triu(1).bool(), -torch.inf)
    heads = (scores.softmax(-1) @ v).transpose(1, 2)
    heads = heads / (heads.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w["norm.weight"]
    gate = torch.sigmoid(u @ w["gate_down.weight"].mT @ w["gate_up.weight"].mT + w["gate_up.bias"])
    torch.testing.assert_close(layer(u)[0], heads.flatten(-2) * gate @ w["o_proj.weight"].mT)


def test_an_arm_reads_no_later_byte(arm, bytes_of):
    seen: list[Tensor] = []
    arm.embedding.register_forward_hook(lambda _, __, out: seen.append(out))
    logits = arm(bytes_of(1, 23)).logits
    for t in range(23):
        (gradient,) = torch.autograd.grad(logits[:, t].sum(), seen[0], retain_graph=True)
        assert not bool(gradient[:, t + 1 :].any())
        assert bool(gradient[:, t].any())


@pytest.mark.parametrize("pieces", [(20, 21), (1, 40), (2, 1, 38)])
def test_an_arm_reads_pieces_as_the_whole(pieces, arm, bytes_of):
    ids, logits, state = bytes_of(2, 41), [], arm.init_state(2)
    with torch.no_grad():
        for piece in ids.split(pieces, 1):
            output = arm(piece, state, return_state=True)
            logits, state = [*logits, output.logits], output.state
        torch.testing.assert_close(torch.cat(logits, 1), arm(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_reset_sequence_of_an_arm_starts_anew(arm, bytes_of):
    past, ids = arm(bytes_of(3, 9), return_state=True).state, bytes_of(3, 12, seed=1)
    logits = arm(ids, past.reset(torch.tensor([False, True, False]))).logits
    torch.testing.assert_close(logits[1], arm(ids).logits[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits[[0, 2]], arm(ids, past).logits[[0, 2]], rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert float((arm(ids).logits[0] - logits[0]).abs().max()) > 1e-4


def test_an_arm_trains_every_parameter_and_writes(arm, bytes_of):
    output = arm(bytes_of(2, 21))
    (output.logits.square().mean() + output.balance_loss).backward()
    for name, parameter in arm.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
    assert len(b"".join(generate(arm, b"abc", 5, seed=1))) == 5


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("changes", "key", "own", "other"),
    [({"kind": "dense"}, "experts.kind", "tsct", "dense"), ({"mixer": "sdpa"}, "model.mixer", "kda", "sdpa")],
)
def test_weights_of_one_arm_are_refused_by_another_by_name(changes, key, own, other, strict, tiny, tiny_config):
    arm = Dormouse(tiny_config(**changes))
    with pytest.raises(RuntimeError, match=rf"weights are of {key} '{other}' and this model is of '{own}'"):
        tiny.load_state_dict(arm.state_dict(), strict=strict)
    with pytest.raises(RuntimeError, match=rf"weights are of {key} '{own}' and this model is of '{other}'"):
        arm.load_state_dict(tiny.state_dict(), strict=strict)


@pytest.mark.parametrize(("changes", "key"), [({"kind": "dense"}, "experts.kind"), ({"mixer": "sdpa"}, "model.mixer")])
def test_a_file_of_one_arm_is_no_start_of_another(changes, key, tiny, tiny_config, tmp_path):
    arm = Dormouse(tiny_config(**changes))
    before = {name: value.clone() for name, value in tiny.state_dict().items()}
    export(arm, tmp_path / "arm.safetensors")
    with pytest.raises(CheckpointError, match=f"weights: these weights are of {key}"):
        install(tiny, tmp_path / "arm.safetensors")
    assert all(torch.equal(value, before[name]) for name, value in tiny.state_dict().items())


def test_dense_experts_on_kernels_that_they_have_none_of_are_refused(tiny_config):
    with pytest.raises(ConfigError, match="implementation is 'triton', which serves kind 'tsct' alone; use 'auto'"):
        tiny_config(kind="dense", implementation="triton")
