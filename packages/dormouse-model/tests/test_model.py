"""The whole model: names, shapes, continuation from a state, causality."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dormouse_kernels import Counters
from dormouse_model import Dormouse, State
from dormouse_model.kda import layer
from torch import Tensor

NAMES = [
    "embedding.weight",
    "head.weight",
    "iteration_embedding",
    "alpha",
    "norm.weight",
    "readout.weight",
    "block.controller.weight",
    "block.norm.weight",
    "block.memory.weight",
    "block.memory.engram.tables",
    "block.memory.engram.key.weight",
    "block.memory.engram.value.weight",
    "block.memory.engram.query_norm.weight",
    "block.memory.engram.key_norm.weight",
    "block.memory.engram.conv_norm.weight",
    "block.memory.engram.conv.weight",
    "block.kda.q_proj.weight",
    "block.kda.k_proj.weight",
    "block.kda.v_proj.weight",
    "block.kda.o_proj.weight",
    "block.kda.q_conv.weight",
    "block.kda.k_conv.weight",
    "block.kda.v_conv.weight",
    "block.kda.decay_down.weight",
    "block.kda.decay_up.weight",
    "block.kda.A_log",
    "block.kda.dt_bias",
    "block.kda.beta_proj.weight",
    "block.kda.gate_down.weight",
    "block.kda.gate_up.weight",
    "block.kda.gate_up.bias",
    "block.kda.norm.weight",
    "block.experts.router.weight",
    "block.experts.gate_up_proj",
    "block.experts.v",
    "block.experts.scale",
    "block.experts.down.weight",
    "block.experts.shared.gate_up_proj",
    "block.experts.shared.v",
    "block.experts.shared.scale",
]


def test_the_names_of_the_parameters_are_a_contract(tiny):
    assert sorted(name for name, _ in tiny.named_parameters()) == sorted(NAMES)


def test_logits_losses_and_counts_have_their_shapes_and_dtypes(tiny, bytes_of):
    output = tiny(bytes_of(2, 7))
    assert (output.logits.shape, output.logits.dtype) == ((2, 7, 256), torch.float32)
    assert (output.balance_loss.shape, output.balance_loss.dtype) == ((), torch.float32)
    assert (output.expert_counts.shape, output.expert_counts.dtype) == ((2, 5), torch.int64)
    assert output.state is None


def test_bytes_may_come_as_uint8_or_int64(tiny, bytes_of):
    ids = bytes_of(2, 7)
    assert torch.equal(tiny(ids).logits, tiny(ids.long()).logits)


@pytest.mark.parametrize("shape", [(1, 1), (1, 16), (3, 15), (1, 37)])
def test_every_parameter_gets_a_finite_gradient_at_any_length(shape, tiny, bytes_of):
    output = tiny(bytes_of(*shape), return_state=True)
    assert output.state is not None
    loss = output.logits.square().mean() + output.balance_loss
    (loss + sum(t.square().mean() for i in output.state.iterations for t in i.tensors())).backward()
    for name, parameter in tiny.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name


def test_wrong_inputs_are_refused_with_the_mend(tiny, bytes_of):
    with pytest.raises(ValueError, match=r"ids must be integers of shape \[B, T\], got torch\.uint8 \(7,\)"):
        tiny(bytes_of(7))
    with pytest.raises(ValueError, match=r"got torch\.float32"):
        tiny(torch.zeros(1, 3))
    with pytest.raises(ValueError, match="ids holds no byte; pass at least one"):
        tiny(bytes_of(2, 0))
    with pytest.raises(ValueError, match=r"batch 3, the call of 2 and 2; make one with init_state\(2\)"):
        tiny(bytes_of(2, 7), tiny.init_state(3))
    with pytest.raises(ValueError, match=r"state is of a model without Engram; make one with init_state\(2\)"):
        tiny(bytes_of(2, 7), State(tiny.init_state(2).iterations))


def test_the_first_state_is_no_state(tiny, bytes_of):
    ids = bytes_of(2, 20)
    assert torch.equal(tiny(ids, tiny.init_state(2)).logits, tiny(ids).logits)


def test_a_state_takes_the_same_memory_however_long_the_past_is(tiny, bytes_of):
    sizes = {tiny(bytes_of(2, length), return_state=True).state.nbytes for length in (1, 5, 60)}
    # 2 sequences: in each of 2 iterations 3 heads of 8 x 8 and (3 + 1) x 3 x 24 convolution inputs, 4 bytes each; and
    # once the last 3 bytes, of 2 bytes each
    assert sizes == {2 * (2 * (3 * 8 * 8 + 4 * 3 * 24) * 4 + 3 * 2)} == {tiny.init_state(2).nbytes}


def in_pieces(model: Dormouse, ids: Tensor, pieces: tuple[int, ...], between: Callable[[State], State]) -> Tensor:
    state, logits = None, []
    for piece in ids.split(pieces, 1):
        output = model(piece, state, return_state=True)
        state = between(output.state)
        logits.append(output.logits)
    return torch.cat(logits, 1)


def gradients(model: Dormouse, logits: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits)
    (logits * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("pieces", [(64, 66), (63, 67), (1, 129), (65, 65), (16, 114), (2, 1, 3, 124)])
def test_a_sequence_in_pieces_is_the_whole_values_and_gradients(pieces, tiny, bytes_of):
    """In fp64, so that equal means equal; the router, whose choices are the same, would hide nothing at 1e-10."""
    model, ids = tiny.double(), bytes_of(2, 130)
    whole = model(ids).logits
    pieced = in_pieces(model, ids, pieces, lambda state: state)
    torch.testing.assert_close(pieced, whole, rtol=1e-10, atol=1e-10)
    want = gradients(model, whole)
    for name, got in gradients(model, pieced).items():
        torch.testing.assert_close(got, want[name], rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("pieces", [(64, 66), (63, 67), (1, 129)])
def test_in_fp32_pieces_differ_from_the_whole_by_rounding(pieces, tiny, bytes_of):
    ids = bytes_of(2, 130)
    with torch.no_grad():
        off = in_pieces(tiny, ids, pieces, lambda state: state) - tiny(ids).logits
    assert float(off.abs().max()) < 2e-5


def test_a_detached_state_carries_values_and_no_gradient(tiny, bytes_of):
    ids, seen = bytes_of(1, 40), []
    tiny.embedding.register_forward_hook(lambda _, __, out: seen.append(out))
    for between, reaches in ((State.detach, False), (lambda state: state, True)):
        seen.clear()
        logits = in_pieces(tiny, ids, (20, 20), between)
        gradient = torch.autograd.grad(logits[:, 20:].sum(), seen[0], allow_unused=True)[0]
        assert (gradient is not None and bool((gradient != 0).any())) == reaches


def test_iteration_i_continues_iteration_i_alone(tiny, bytes_of):
    """Disturbing the state of one iteration leaves the others' next state as it was, up to the first that reads it."""
    ids = bytes_of(1, 20)
    state = tiny(ids, return_state=True).state
    disturbed = State((state.iterations[0], state.iterations[1].map(lambda t: t + 1)), state.last_bytes)
    one, two = (tiny(ids, s, return_state=True).state for s in (state, disturbed))
    assert all(map(torch.equal, one.iterations[0].tensors(), two.iterations[0].tensors()))
    assert not torch.equal(one.iterations[1].mixer.recurrent, two.iterations[1].mixer.recurrent)


def future_reads(model: Dormouse, ids: Tensor, state: State | None = None) -> int:
    """How many (t, later byte) pairs have a gradient that is not exactly zero, over every t of the model's logits."""
    seen: list[Tensor] = []
    hook = model.embedding.register_forward_hook(lambda _, __, out: seen.append(out))
    logits = model(ids, state).logits
    hook.remove()
    found = 0
    for t in range(ids.shape[1]):
        (gradient,) = torch.autograd.grad(logits[:, t].sum(), seen[0], retain_graph=True)
        assert bool((gradient[:, t] != 0).any())
        found += int((gradient[:, t + 1 :] != 0).any(-1).sum())
    return found


def test_no_logit_has_a_gradient_of_a_later_byte(tiny, bytes_of):
    ids = bytes_of(1, 37)
    assert future_reads(tiny, ids) == 0
    assert future_reads(tiny, ids, tiny(bytes_of(1, 5, seed=1), return_state=True).state.detach()) == 0


def hand_over(model: Dormouse, _: pytest.MonkeyPatch) -> None:
    """The state that iteration i leaves becomes the state that iteration i+1 starts from."""
    forward, left = model.block.forward, []

    def leaky(hidden: Tensor, x: Tensor, embedding: Tensor, alpha: Tensor, recall: Any, state: Any) -> Any:
        output = forward(hidden, x, embedding, alpha, recall, left[-1] if left else state)
        left.append(output.state)
        return output

    model.block.forward = leaky


def look_ahead(_: Dormouse, patch: pytest.MonkeyPatch) -> None:
    """The convolution stands one byte too far to the right."""
    causal = layer.causal_conv

    def ahead(x: Tensor, weight: Tensor, tail: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return causal(torch.cat([x[:, 1:], x[:, -1:]], 1), weight, tail)

    patch.setattr(layer, "causal_conv", ahead)


@pytest.mark.parametrize("leak", [hand_over, look_ahead])
def test_a_planted_leak_is_found(leak, tiny, bytes_of, monkeypatch):
    leak(tiny, monkeypatch)
    assert future_reads(tiny, bytes_of(1, 37)) > 10


def test_an_edited_byte_changes_no_earlier_logit(tiny_config, bytes_of, enliven):
    """Bit for bit where every row is computed alike (fixed capacity), within rounding where an edit regroups rows."""
    ids = bytes_of(1, 70)
    edited = ids.clone()
    edited[0, 50] ^= 0x55
    for changes, bound in (({"implementation": "padded", "capacity": 140}, 0.0), ({}, 1e-5)):
        model = enliven(Dormouse(tiny_config(**changes)))
        with torch.no_grad():
            off = (model(ids).logits - model(edited).logits).abs()
        assert float(off[:, :50].max()) <= bound
        assert float(off[:, 50:].max()) > 1e-2


def test_a_sequence_is_the_same_alone_and_in_a_batch(tiny, bytes_of):
    ids = bytes_of(3, 33)
    with torch.no_grad():
        alone = torch.cat([tiny(ids[row : row + 1]).logits for row in range(3)])
        torch.testing.assert_close(tiny(ids).logits, alone, rtol=1e-5, atol=1e-5)


def test_a_state_dict_carries_the_whole_function(tiny, tiny_config, bytes_of):
    other = Dormouse(tiny_config(), seed=9)
    addresses = {name: p.data_ptr() for name, p in other.named_parameters()}
    other.load_state_dict(tiny.state_dict())
    assert torch.equal(other(bytes_of(2, 20)).logits, tiny(bytes_of(2, 20)).logits)
    assert all(torch.equal(a.master(), b.master()) for a, b in zip(other.factors(), tiny.factors(), strict=True))
    assert addresses == {name: p.data_ptr() for name, p in other.named_parameters()}


def test_a_forward_counts_each_site_once_an_iteration(tiny, bytes_of):
    with Counters() as counters, torch.no_grad():
        state = tiny(bytes_of(2, 20), return_state=True).state
        tiny(bytes_of(2, 1), state)
    counts = {key: n for key, n in counters.snapshot().items() if n}
    assert counts == {
        "kda/forward/bounded": 2,
        "kda/decode/recurrent": 2,
        "moe.latent_glu_experts/forward/reference": 4,
    }


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
def test_under_bf16_autocast_the_model_is_itself_within_bf16(inside, tiny_config, bytes_of, enliven):
    """All experts for every byte: a choice that rounding tips over would say nothing about the arithmetic."""
    model, ids = enliven(Dormouse(tiny_config(top_k=5))), bytes_of(2, 40)
    exact = model(ids).logits
    want = gradients(model, exact)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(ids).logits
        got = gradients(model, rounded) if inside else {}
    got = got or gradients(model, rounded)
    assert rounded.dtype == torch.float32
    for name, one, other in [("logits", rounded, exact), *((n, got[n], want[n]) for n in want)]:
        assert float((one - other).norm().detach()) < 0.08 * float(other.norm().detach()), name


def test_the_dense_path_keeps_its_floor_whatever_the_gate_says(tiny_config):
    memory = Dormouse(tiny_config(memory_max=0.3, enabled=False)).block.memory
    u, gates = torch.randn(1, 2, 24), torch.tensor([[[0.0], [1.0]]])
    kept, _ = memory(u, gates, None, None)
    torch.testing.assert_close(kept, u @ memory.weight.mT * torch.tensor([[[1.0], [0.7]]]))
