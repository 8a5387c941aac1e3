from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("length", [1, 2, 15, 200])
def test_a_state_keeps_nothing_of_the_past_but_itself(tiny, bytes_of, length):
    with torch.no_grad():
        state = tiny(bytes_of(2, length), return_state=True).state
    for iteration in state.iterations:
        for tensor in iteration.tensors():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_a_clone_shares_no_memory(tiny, bytes_of):
    state = tiny(bytes_of(1, 5), return_state=True).state
    copy = state.clone()
    for one, other in zip(state.iterations, copy.iterations, strict=True):
        for a, b in zip(one.tensors(), other.tensors(), strict=True):
            assert torch.equal(a, b)
            assert a.data_ptr() != b.data_ptr()


def test_a_detached_state_shares_the_values_and_needs_no_gradient(tiny, bytes_of):
    state = tiny(bytes_of(1, 5), return_state=True).state
    assert all(t.requires_grad for i in state.iterations for t in i.tensors())
    detached = state.detach()
    assert not any(t.requires_grad for i in detached.iterations for t in i.tensors())
    assert detached.iterations[0].recurrent.data_ptr() == state.iterations[0].recurrent.data_ptr()


def test_a_state_knows_its_batch_and_moves(tiny):
    state = tiny.init_state(3)
    assert state.batch_size == 3
    assert all(t.is_meta for i in state.to("meta").iterations for t in i.tensors())


def test_the_recurrent_state_is_fp32_and_there_is_one_an_iteration(tiny_config):
    from dormouse_model import Dormouse

    state = Dormouse(tiny_config(iterations=3)).init_state(2)
    assert len(state.iterations) == 3
    assert all(i.recurrent.dtype == torch.float32 and i.recurrent.shape == (2, 3, 8, 8) for i in state.iterations)
    assert all(i.tails.shape == (2, 3, 3 * 24) for i in state.iterations)
