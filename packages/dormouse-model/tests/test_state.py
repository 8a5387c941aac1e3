from __future__ import annotations

import pytest
import torch
from dormouse_model import Dormouse, State
from safetensors.torch import load_file, save_file


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


@pytest.mark.parametrize("mixer", ["kda", "sdpa"])
@pytest.mark.parametrize("enabled", [True, False], ids=["engram", "no engram"])
def test_a_state_is_saved_and_loaded_bit_for_bit(enabled, mixer, tiny_config, bytes_of, tmp_path):
    model = Dormouse(tiny_config(enabled=enabled, mixer=mixer))
    state = model(bytes_of(3, 9), return_state=True).state
    state.save(tmp_path / "past")
    loaded = State.load(tmp_path / "past")
    assert len(loaded.tensors()) == len(state.tensors())
    for one, other in zip(state.tensors(), loaded.tensors(), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    model(bytes_of(3, 2), loaded)


def test_a_saved_state_is_a_few_named_tensors_stacked_over_iterations(tiny, bytes_of, tmp_path):
    tiny(bytes_of(3, 9), return_state=True).state.save(tmp_path / "past")
    shapes = {name: tuple(held.shape) for name, held in load_file(tmp_path / "past").items()}
    assert shapes == {
        "recurrent": (2, 3, 3, 8, 8),
        "tails": (2, 3, 3, 72),
        "engram": (2, 3, 3, 24),
        "last_bytes": (3, 3),
    }


def test_what_is_no_state_is_refused_by_its_file(tiny, tmp_path):
    (tmp_path / "words").write_bytes(b"words")
    save_file(tiny.state_dict(), tmp_path / "model")
    for name in ("words", "model"):
        with pytest.raises(ValueError, match=rf"State\.load: .*{name} holds no state \(.*give a file that save wrote"):
            State.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        State.load(tmp_path / "nothing")


def test_a_loaded_state_of_another_model_is_refused(tiny_config, bytes_of, tmp_path):
    Dormouse(tiny_config(orders=[1, 2])).init_state(1).save(tmp_path / "past")
    with pytest.raises(ValueError, match="state holds tensors of"):
        Dormouse(tiny_config(orders=[1, 2, 4]))(bytes_of(1, 5), State.load(tmp_path / "past"))


@pytest.mark.parametrize("mixer", ["kda", "sdpa"])
def test_states_side_by_side_are_the_sequences_of_each(mixer, tiny_config, bytes_of, enliven):
    """Pasts of different lengths, which softmax attention pads, and back in another order."""
    model, ids = enliven(Dormouse(tiny_config(mixer=mixer))), bytes_of(3, 12, seed=1)
    pasts = [model(bytes_of(rows, length), return_state=True).state for rows, length in ((2, 9), (1, 3))]
    logits = model(ids, State.cat(pasts)).logits
    torch.testing.assert_close(logits[:2], model(ids[:2], pasts[0]).logits)
    torch.testing.assert_close(logits[2:], model(ids[2:], pasts[1]).logits)
    turned = model(ids[[2, 0]], State.cat(pasts).select([2, 0])).logits
    torch.testing.assert_close(turned, logits[[2, 0]])
    assert State.cat(pasts[:1]).batch_size == 2
