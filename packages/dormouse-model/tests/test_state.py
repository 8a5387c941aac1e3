from __future__ import annotations

import pytest
import torch
from dormouse_model import Dormouse, State


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
    assert detached.iterations[0].mixer.recurrent.data_ptr() == state.iterations[0].mixer.recurrent.data_ptr()


@pytest.mark.parametrize("enabled", [True, False])
def test_a_reset_sequence_starts_anew_and_the_others_go_on(enabled, tiny_config, bytes_of, enliven):
    model = enliven(Dormouse(tiny_config(enabled=enabled)))
    past, ids = model(bytes_of(3, 9), return_state=True).state, bytes_of(3, 12, seed=1)
    # A NaN of the past must not survive: 0 * NaN would.
    past = State(
        tuple(i.map(lambda t: t.index_fill(0, torch.tensor([1]), torch.nan)) for i in past.iterations), past.last_bytes
    )
    logits = model(ids, past.reset(torch.tensor([False, True, False]))).logits
    fresh, going_on = model(ids).logits, model(ids, past).logits
    torch.testing.assert_close(logits[1], fresh[1])
    torch.testing.assert_close(logits[[0, 2]], going_on[[0, 2]])
    assert float((fresh[0] - going_on[0]).abs().max().detach()) > 1e-3


def test_no_gradient_passes_a_reset(tiny, bytes_of):
    past = tiny(bytes_of(2, 9), return_state=True).state
    reset = past.reset(torch.tensor([True, False]))
    for before, after in zip(past.tensors(), reset.tensors(), strict=True):
        if after.requires_grad:
            (gradient,) = torch.autograd.grad(after.sum(), before, retain_graph=True)
            assert not bool(gradient[0].any())
            assert bool((gradient[1] == 1).all())


def test_rows_to_reset_are_one_bool_a_sequence(tiny):
    for rows in (torch.tensor([True]), torch.tensor([1, 0, 1])):
        with pytest.raises(ValueError, match=r"State\.reset: rows is .*; pass bool \[3\], one a sequence"):
            tiny.init_state(3).reset(rows)


def test_a_state_knows_its_batch_and_moves(tiny):
    state = tiny.init_state(3)
    assert state.batch_size == 3
    assert all(t.is_meta for i in state.to("meta").iterations for t in i.tensors())


def test_the_recurrent_state_is_fp32_and_there_is_one_an_iteration(tiny_config):
    state = Dormouse(tiny_config(iterations=3)).init_state(2)
    assert len(state.iterations) == 3
    for recurrent, tails in (i.mixer.tensors() for i in state.iterations):
        assert (recurrent.dtype, recurrent.shape, tails.shape) == (torch.float32, (2, 3, 8, 8), (2, 3, 3 * 24))
    assert all(i.engram is not None and i.engram.shape == (2, 3, 24) for i in state.iterations)
    assert state.last_bytes is not None
    assert torch.equal(state.last_bytes, torch.full((2, 3), -1, dtype=torch.int16))
