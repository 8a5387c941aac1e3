"""Small random models of transformers train on `experts_implementation="dormouse"` as they do on "eager"."""

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from dormouse_kernels import Counters
from dormouse_kernels.integrations.transformers import OLDEST, experts_forward, register

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "num_experts_per_tok": 2,
}  # fmt: skip


def qwen3_moe(implementation):
    """SwiGLU experts, in the layout of `glu_experts`."""
    config = transformers.Qwen3MoeConfig(**SIZES, num_experts=5, moe_intermediate_size=12)
    return made(transformers.Qwen3MoeForCausalLM, config, implementation)


def gpt_oss(implementation):
    """Biases, transposed banks, gate and up interleaved, a gate of its own."""
    config = transformers.GptOssConfig(**SIZES, num_local_experts=5)
    model = made(transformers.GptOssForCausalLM, config, implementation)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(generator=generator)
    return model


def nemotron_h(implementation):
    """Experts without a gate: `up_proj`, squared ReLU, `down_proj`."""
    config = transformers.NemotronHConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        layers_block_type=["attention", "moe"], n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=12,
        moe_shared_expert_intermediate_size=12,
    )  # fmt: skip
    return made(transformers.NemotronHForCausalLM, config, implementation)


def made(kind, config, implementation):
    torch.manual_seed(0)
    model = kind._from_config(config, experts_implementation=implementation, attn_implementation="eager")
    assert model.config._experts_implementation == implementation
    return model.train()


def two_steps(model):
    """The gradients of two steps of AdamW, by parameter."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = []
    for step in range(2):
        ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(step))
        model(input_ids=ids, labels=ids).loss.backward()
        steps.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return steps


@pytest.mark.parametrize("make", [qwen3_moe, gpt_oss, nemotron_h])
def test_two_steps_of_a_model_have_the_eager_gradients(make):
    register()
    wanted = two_steps(make("eager"))
    with Counters() as counters:
        got = two_steps(make("dormouse"))
    op = "glu_experts" if make is qwen3_moe else "grouped_mm"
    assert counters.snapshot()[f"moe.{op}/forward/reference"] > 0
    for step in range(2):
        assert got[step].keys() == wanted[step].keys()
        assert any("gate" in name or "router" in name for name in got[step])
        for name, gradient in got[step].items():
            error = ((gradient - wanted[step][name]).norm() / wanted[step][name].norm()).item()
            assert error <= 1e-5, f"{name} of step {step}: relative error {error:.1e}"


def test_an_index_past_the_experts_gives_zeros_to_any_kind_of_experts():
    register()
    for make in (qwen3_moe, gpt_oss):
        (experts,) = [m for n, m in make("dormouse").named_modules() if n.endswith("layers.0.mlp.experts")]
        x, weights = torch.randn(3, 16), torch.ones(3, 2)
        index = torch.tensor([[0, 5], [5, 5], [4, 1]])
        out = experts_forward(experts, x, index, weights)
        assert torch.equal(out[1], torch.zeros(16))
        weights[:2, 1] = torch.nan
        assert torch.equal(experts_forward(experts, x, index, weights), out), make.__name__


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ImportError, match=r"register: transformers is not installed; .*dormouse-kernels\[transformers\]"
    ):
        register()


def test_an_older_transformers_is_named_with_the_one_that_serves(monkeypatch):
    # not `transformers` itself: on its first import it replaces that module by a lazy one
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.2.1")
    with pytest.raises(ImportError, match=r"register: transformers is 5.2.1, .*; install transformers>=5.17"):
        register()


def test_the_oldest_accepted_version_is_the_one_that_the_extra_asks_for():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["transformers"] == [f"transformers>={OLDEST},<6"]
