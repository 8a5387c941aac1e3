"""The smallest and the most awkward sizes that a configuration admits, and what the model refuses to be called with."""

from __future__ import annotations

import pytest
import torch
from dormouse_model import Dormouse
from dormouse_model.state import State

SIZES = {
    "one head": {"num_heads": 1},
    "heads of one channel": {"head_dim": 1},
    "one expert": {"num_experts": 1, "top_k": 1},
    "one normalised expert": {"num_experts": 1, "top_k": 1, "norm_topk_prob": True},
    "every expert": {"top_k": 5},
    "rank of the model": {"rank": 24, "shared_rank": 24},
    "rank of the ffn": {"rank": 5, "shared_rank": 5, "d_ffn": 5},
    "width one": {"rank": 1, "shared_rank": 1, "d_ffn": 1},
    "one iteration": {"iterations": 1},
    "four iterations": {"iterations": 4},
}


@pytest.mark.parametrize("changes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 2), (3, 17)])
def test_every_parameter_gets_a_finite_gradient_and_bytes_may_come_one_by_one(
    tiny_config, bytes_of, changes, batch, length
):
    model, ids = Dormouse(tiny_config(**changes)), bytes_of(batch, length)
    whole = model(ids)
    (whole.logits.square().mean() + whole.balance_loss).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.to_dense().isfinite().all()), name
    state, pieces = None, []
    with torch.no_grad():
        for byte in ids.split(1, 1):
            piece = model(byte, state, return_state=True)
            state = piece.state
            pieces.append(piece.logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_ids_of_any_integer_that_holds_a_byte_and_of_any_layout_are_the_same_bytes(tiny, bytes_of, dtype):
    ids = bytes_of(2, 9)
    turned = torch.empty(9, 2, dtype=dtype).T.copy_(ids)
    assert not turned.is_contiguous()
    assert torch.equal(tiny(turned).logits, tiny(ids).logits)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float32, torch.complex64])
def test_ids_of_a_dtype_that_holds_no_bytes_are_refused(tiny, dtype):
    with pytest.raises(ValueError, match=rf"ids must be .*got torch\.{str(dtype)[6:]} \(2, 9\)"):
        tiny(torch.zeros(2, 9, dtype=dtype))


@pytest.mark.parametrize("changes", [{"num_heads": 6, "head_dim": 4}, {"conv_size": 2}, {"head_dim": 4}])
def test_the_state_of_another_model_is_refused(tiny, tiny_config, bytes_of, changes):
    section = "kda" if "conv_size" in changes else "model"
    config = tiny_config()
    part = getattr(config, section).model_copy(update=changes)
    state = Dormouse(config.model_copy(update={section: part})).init_state(2)
    with pytest.raises(ValueError, match=r"state holds tensors of .* make one with init_state\(2\)"):
        tiny(bytes_of(2, 3), state)


def test_a_state_of_another_batch_or_depth_is_refused(tiny, bytes_of):
    for state in (tiny.init_state(3), State(tiny.init_state(2).iterations[:1])):
        with pytest.raises(ValueError, match="make one with init_state"):
            tiny(bytes_of(2, 3), state)
