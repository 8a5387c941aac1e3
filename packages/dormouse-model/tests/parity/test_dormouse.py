"""The whole model on a GPU under bf16 autocast, on its kernels, against itself in fp32 on a CPU."""

from __future__ import annotations

import pytest
import torch
from dormouse_kernels import Counters
from dormouse_kernels.proof import relative_errors
from dormouse_model import Dormouse, ModelConfig, generate
from dormouse_model.config import validate
from dormouse_model.loss import next_byte_loss

# Every byte uses every expert: a choice that bf16 tips over would say nothing about the arithmetic.
TABLES = {
    "model": {"d_model": 64, "num_heads": 2, "head_dim": 32},
    "experts": {"num_experts": 4, "top_k": 4, "rank": 16, "shared_rank": 16, "d_ffn": 171},
    "engram": {"enabled": True, "rows": 300},
}
WATCHED = (
    "embedding.weight",
    "block.kda.q_proj.weight",
    "block.kda.v_conv.weight",
    "block.memory.engram.value.weight",
    "block.experts.v",
    "readout.weight",
)


def measured(device: torch.device) -> dict[str, torch.Tensor]:
    """Logits, loss and some gradients of the second of two pieces that are joined by their state."""
    model = Dormouse(validate(ModelConfig, TABLES), device=device)
    engram = model.block.memory.engram
    assert engram is not None
    with torch.no_grad():
        engram.tables.copy_(torch.randn(engram.tables.shape, generator=torch.Generator().manual_seed(1)))
    ids = torch.randint(0, 256, (2, 129), generator=torch.Generator().manual_seed(0)).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        first = model(ids[:, :64], return_state=True)
        output = model(ids[:, 64:-1], first.state)
    loss = next_byte_loss(output.logits, ids[:, 65:]) + output.balance_loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if name in WATCHED and p.grad is not None}
    assert len(gradients) == len(WATCHED)
    return {"logits": output.logits, "loss": loss, **gradients}


@pytest.mark.gpu
def test_the_model_on_its_kernels_is_the_model_in_plain_torch(proof):
    def measure(device: torch.device) -> dict[str, float]:
        with Counters() as counters:
            got = measured(device)
        assert counters.snapshot()["kda/forward/fla"] == 4
        assert counters.fallbacks() == 0
        return relative_errors(got, measured(torch.device("cpu")))

    proof.parity("dormouse", "B2 T64+64 d64", torch.bfloat16, "gpu", bound=3e-2, measure=measure)


@pytest.mark.gpu
def test_generation_on_a_gpu_reads_by_kernel_and_writes_by_recurrence(proof):
    def measure(device: torch.device) -> dict[str, float]:
        model = Dormouse(validate(ModelConfig, TABLES), device=device)
        with Counters() as counters:
            written = list(generate(model, b"def dormouse", 9, seed=1))
        counts = {name: counters.snapshot()[f"kda/{name}"] for name in ("forward/fla", "decode/recurrent")}
        assert counts == {"forward/fla": 2, "decode/recurrent": 2 * 8}
        return {"bytes missing": 9.0 - len(written)}

    proof.parity("dormouse.generate", "12 + 9 bytes", torch.bfloat16, "gpu", bound=0.0, measure=measure)
