"""KDA's implementations held to the recurrence in fp64: values, final state, and the gradient of every input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dormouse_kernels import Counters
from dormouse_kernels.proof import relative_errors
from dormouse_model.kda.op import kda, log_decay
from dormouse_model.kda.selection import Requested

NAMES = ("q", "k", "v", "gate", "beta", "A_log", "dt_bias", "initial_state")
LOWER_BOUND = -5.0
Tensors = dict[str, torch.Tensor]


def draw(batch: int, length: int, heads: int, size: int, *, strong: bool) -> Tensors:
    """Random inputs in fp64; `strong` puts most decays near the bound of -5 a byte."""
    source = torch.Generator().manual_seed(batch + length + size)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    whole = (batch, length, heads, size)
    return {
        "q": normal(*whole),
        "k": normal(*whole),
        "v": normal(*whole),
        "gate": normal(*whole) * 2 + (6 if strong else -3),
        "beta": torch.rand(batch, length, heads, generator=source, dtype=torch.float64),
        "A_log": normal(heads) * 0.3,
        "dt_bias": normal(heads * size),
        "initial_state": normal(batch, heads, size, size),
    }


def results(inputs: Tensors, implementation: Requested, *, bounded: bool = True) -> Tensors:
    """Output, final state and gradients of one fixed loss. `bounded=False` hands over the log decay itself."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}
    arguments: dict[str, Any] = dict(leaves)
    if not bounded:
        A_log, dt_bias = arguments.pop("A_log"), arguments.pop("dt_bias")
        arguments["gate"] = log_decay(arguments["gate"], A_log, dt_bias, LOWER_BOUND)
    output, state = kda(**arguments, lower_bound=LOWER_BOUND if bounded else None, implementation=implementation)
    weights = torch.Generator().manual_seed(7)
    loss = sum((t * torch.randn(t.shape, generator=weights).to(t)).sum() for t in (output, state))
    assert isinstance(loss, torch.Tensor)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {"o": output, "state": state} | {f"d_{n}": g for n, g in zip(NAMES, gradients, strict=True)}


def cast(inputs: Tensors, dtype: torch.dtype, device: torch.device) -> Tensors:
    """Activations in `dtype`; what stays in fp32 whatever they are, in fp32 at least."""
    wide = torch.promote_types(dtype, torch.float32)
    kept = ("A_log", "dt_bias", "initial_state")
    return {n: t.to(device, wide if n in kept else dtype) for n, t in inputs.items()}


@pytest.mark.parametrize("strong", [False, True], ids=["mild", "strong"])
@pytest.mark.parametrize("length", [1, 16, 75])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("bounded", [True, False], ids=["bounded", "any-decay"])
def test_the_chunked_rule_is_the_recurrence(proof, bounded, dtype, length, strong):
    inputs = draw(2, length, 3, 32, strong=strong)
    # Near the bound a gate's gradient is a small difference of large terms.
    bound = {torch.float64: 1e-12, torch.float32: 1e-4 if strong else 1e-5}[dtype]

    def measure(device: torch.device) -> dict[str, float]:
        got = results(cast(inputs, dtype, device), "torch", bounded=bounded)
        return relative_errors(got, results(inputs, "recurrent"))

    op = "kda.bounded" if bounded else "kda.chunk"
    shape = f"B2 T{length} H3 K32 {'strong' if strong else 'mild'}"
    proof.parity(op, shape, dtype, "reference", bound=bound, measure=measure)


# The bounds are those of flash-linear-attention's own tests, and half of its bound on the gates' parameters.
GROUPS = {
    "outputs": (("o", "state"), 5e-3),
    "operands": (("d_q", "d_k", "d_v", "d_initial_state"), 8e-3),
    "gates": (("d_gate", "d_beta", "d_A_log", "d_dt_bias"), 2e-2),
}


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("length", [1, 63, 64, 200])
def test_flash_linear_attention_is_the_recurrence(proof, length, group):
    names, bound = GROUPS[group]
    rounded = cast(draw(2, length, 4, 64, strong=False), torch.bfloat16, torch.device("cpu"))
    oracle = {n: t.double() for n, t in rounded.items()}

    def measure(device: torch.device) -> dict[str, float]:
        with Counters() as counters:
            got = results({n: t.to(device) for n, t in rounded.items()}, "fla")
        assert counters.snapshot() == {"kda/forward/fla": 1}
        want = results(oracle, "recurrent")
        return relative_errors({n: got[n] for n in names}, {n: want[n] for n in names})

    proof.parity("kda.fla", f"B2 T{length} H4 K64 {group}", torch.bfloat16, "gpu", bound=bound, measure=measure)


@pytest.mark.gpu
def test_plain_torch_on_a_gpu_is_the_recurrence(proof):
    inputs = draw(2, 75, 3, 32, strong=True)

    def measure(device: torch.device) -> dict[str, float]:
        return relative_errors(results(cast(inputs, torch.float32, device), "torch"), results(inputs, "recurrent"))

    proof.parity("kda.bounded", "B2 T75 H3 K32 strong", torch.float32, "gpu", bound=1e-4, measure=measure)


@pytest.mark.gpu
def test_flash_linear_attention_never_reads_the_future(proof):
    """Editing the last byte of 70 changes no earlier output by a single bit."""

    def measure(device: torch.device) -> dict[str, float]:
        inputs = cast(draw(2, 70, 4, 64, strong=False), torch.bfloat16, device)
        edited = {n: t.clone() for n, t in inputs.items()}
        for name in ("q", "k", "v", "gate"):
            edited[name][:, -1] = F.normalize(edited[name][:, -1].float(), dim=-1).to(torch.bfloat16) * 3
        before, after = (results(each, "fla")["o"][:, :-1] for each in (inputs, edited))
        return {"o before the edit": 0.0 if torch.equal(before, after) else 1.0}

    proof.parity("kda.fla", "B2 T70 H4 K64 causality", torch.bfloat16, "gpu", bound=0.0, measure=measure)
