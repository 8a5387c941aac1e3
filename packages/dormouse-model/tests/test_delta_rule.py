"""The delta rule in its three forms: the recurrence, any decay in chunks, and bounded decay in chunks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from dormouse_model.kda.bounded import bounded_chunk_delta_rule
from dormouse_model.kda.chunk import chunk_delta_rule
from dormouse_model.kda.recurrent import recurrent_delta_rule
from dormouse_model.norm import unit

RULES = {"bounded": bounded_chunk_delta_rule, "any-decay": chunk_delta_rule}
NAMES = ("q", "k", "v", "g", "beta", "state")
Inputs = dict[str, torch.Tensor]


def draw(batch: int, length: int, heads: int = 2, size: int = 8, *, dtype: torch.dtype = torch.float64) -> Inputs:
    source = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    whole = (batch, length, heads, size)
    inputs = {
        "q": unit(normal(*whole)),
        "k": unit(normal(*whole)),
        "v": normal(*whole),
        "g": -5 * torch.sigmoid(normal(*whole) * 2 - 2),
        "beta": torch.rand(batch, length, heads, generator=source, dtype=torch.float64),
        "state": normal(batch, heads, size, size),
    }
    return {name: tensor.to(dtype) for name, tensor in inputs.items()}


def run(rule: Callable, inputs: Inputs, pieces: tuple[int, ...] | None = None, *, times: float = 1.0) -> Inputs:
    """Output, final state and the gradients of one loss of both, `times` it; the sequence in `pieces` if asked."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}
    length, size = inputs["q"].shape[1], inputs["q"].shape[-1]
    state, outputs, start = leaves["state"], [], 0
    for piece in pieces or (length,):
        part = [leaves[name][:, start : start + piece] for name in NAMES[:-1]]
        output, state = rule(*part, scale=size**-0.5, initial_state=state)
        outputs.append(output)
        start += piece
    output = torch.cat(outputs, 1)
    weights = torch.Generator().manual_seed(5)
    loss = sum((t * torch.randn(t.shape, generator=weights, dtype=torch.float64)).sum() for t in (output, state))
    assert isinstance(loss, torch.Tensor)
    gradients = torch.autograd.grad(loss * times, [leaves[name] for name in NAMES])
    return {"o": output, "S": state} | {f"d_{name}": g for name, g in zip(NAMES, gradients, strict=True)}


def errors(got: Inputs, want: Inputs) -> dict[str, float]:
    """Relative error by tensor; infinite where anything is not finite."""
    found = {}
    got, want = ({name: tensor.detach() for name, tensor in each.items()} for each in (got, want))
    for name in want:
        off = (got[name].double() - want[name].double()).norm() / want[name].double().norm().clamp(min=1e-30)
        found[name] = float(off) if bool(got[name].isfinite().all()) else float("inf")
    return found


def assert_close(got: Inputs, want: Inputs, bound: float) -> None:
    over = {name: error for name, error in errors(got, want).items() if error > bound}
    assert not over, f"over {bound:g}: {over}"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
def test_the_backward_is_the_derivative(rule, length):
    inputs = draw(1, length, heads=1, size=3)
    leaves = [inputs[name].requires_grad_() for name in NAMES]

    def call(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return RULES[rule](*tensors[:-1], scale=0.7, initial_state=tensors[-1])

    assert torch.autograd.gradcheck(call, leaves, fast_mode=length > 17, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("pieces", [(64, 66), (63, 67), (1, 129), (65, 65), (3, 2, 125)])
def test_a_sequence_in_pieces_is_the_whole_sequence(rule, pieces):
    inputs = draw(3, 130, dtype=torch.float32)
    assert_close(run(RULES[rule], inputs, pieces), run(RULES[rule], inputs), 2e-6)


@pytest.mark.parametrize("rule", RULES)
def test_pieces_that_end_with_a_chunk_change_no_bit_of_the_output(rule):
    inputs = draw(2, 96, dtype=torch.float32)
    pieces, whole = run(RULES[rule], inputs, (32, 64)), run(RULES[rule], inputs)
    assert torch.equal(pieces["o"], whole["o"])
    assert torch.equal(pieces["S"], whole["S"])


def test_a_piece_that_forgets_the_state_is_noticed():
    inputs = draw(2, 130, dtype=torch.float32)

    def forgetful(*args: torch.Tensor, scale: float, initial_state: torch.Tensor):
        return bounded_chunk_delta_rule(*args, scale=scale, initial_state=initial_state * (args[0].shape[1] != 66))

    assert errors(run(forgetful, inputs, (64, 66)), run(bounded_chunk_delta_rule, inputs))["o"] > 1e-2


@pytest.mark.parametrize("rule", RULES)
def test_a_batch_is_its_rows_one_by_one(rule):
    inputs = draw(3, 40)
    whole = run(RULES[rule], inputs)
    for row in range(3):
        alone = run(RULES[rule], {name: tensor[row : row + 1] for name, tensor in inputs.items()})
        assert_close({"o": alone["o"], "S": alone["S"]}, {n: whole[n][row : row + 1] for n in ("o", "S")}, 1e-12)


def decays(kind: str, inputs: Inputs) -> torch.Tensor:
    """Hard cases of the log decay, in fp64."""
    shape, source = inputs["g"].shape, torch.Generator().manual_seed(3)
    if kind == "none":
        return torch.zeros(shape, dtype=torch.float64)
    if kind == "-5 everywhere":
        return torch.full(shape, -5.0, dtype=torch.float64)
    if kind == "-6 everywhere":
        return torch.full(shape, -6.0, dtype=torch.float64)
    mild = torch.nn.functional.logsigmoid(torch.randn(shape, generator=source, dtype=torch.float64))
    return torch.where(torch.rand(shape, generator=source) < 0.5, -1000.0, mild)


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ("bounded", "none"),
        ("bounded", "-5 everywhere"),
        ("any-decay", "none"),
        ("any-decay", "-6 everywhere"),
        ("any-decay", "-1000 on half"),
    ],
)
def test_strong_decay_is_finite_and_equal_to_the_recurrence(rule, kind):
    inputs = draw(2, 50)
    inputs["g"] = decays(kind, inputs)
    want = run(recurrent_delta_rule, inputs)
    got = run(RULES[rule], {name: tensor.float() for name, tensor in inputs.items()})
    # With the split, d_g is a small difference of large terms where everything decays by e^-5 a byte.
    bound = {"d_g": 1e-4} if rule == "bounded" else {}
    over = {name: error for name, error in errors(got, want).items() if error > bound.get(name, 1e-5)}
    assert not over


def test_small_gradients_keep_their_digits_under_strong_decay():
    """Unanchored, a factor of e^-80 times a gradient of 1e-6 falls out of fp32's normal numbers."""
    inputs = draw(1, 16)
    inputs["g"] = decays("-5 everywhere", inputs)
    want = run(recurrent_delta_rule, inputs, times=1e-6)
    got = run(bounded_chunk_delta_rule, {name: tensor.float() for name, tensor in inputs.items()}, times=1e-6)
    found = errors(got, want)
    assert found.pop("d_g") < 1e-3
    assert max(found.values()) < 1e-5, found


def test_exponentiating_before_the_mask_would_be_noticed():
    """The planted bug of the strong-decay test: the same scores, masked afterwards."""
    total = torch.full((4,), -30.0).cumsum(0).requires_grad_()
    difference = (total[:, None] - total[None, :]) * 4
    future = torch.ones(4, 4, dtype=torch.bool).triu(1)
    late = difference.exp().masked_fill(future, 0.0).sum()
    early = difference.masked_fill(future, -torch.inf).exp().sum()
    assert torch.autograd.grad(late, total, retain_graph=True)[0].isnan().any()
    assert torch.autograd.grad(early, total)[0].isfinite().all()


@pytest.mark.parametrize("rule", RULES)
def test_rows_of_zeros_leave_the_state_alone_and_have_finite_gradients(rule):
    inputs = draw(2, 20)
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name][:, 10:] = 0.0
    got = run(RULES[rule], inputs)
    assert all(bool(tensor.isfinite().all()) for tensor in got.values())
    short = run(RULES[rule], {n: t if n == "state" else t[:, :10] for n, t in inputs.items()})
    assert_close({"S": got["S"]}, {"S": short["S"]}, 1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_no_output_depends_on_a_later_byte(rule):
    inputs = {name: tensor.requires_grad_() for name, tensor in draw(1, 37).items()}
    output, _ = RULES[rule](*(inputs[n] for n in NAMES[:-1]), scale=1.0, initial_state=inputs["state"])
    for t in range(37):
        for gradient in torch.autograd.grad(output[:, t].sum(), [inputs[n] for n in NAMES[:-1]], retain_graph=True):
            assert torch.equal(gradient[:, t + 1 :], torch.zeros_like(gradient[:, t + 1 :]))


@pytest.mark.parametrize("rule", RULES)
def test_an_edit_of_the_last_byte_changes_no_bit_of_the_ones_before(rule):
    inputs = draw(2, 70, dtype=torch.float32)
    edited = {name: tensor.clone() for name, tensor in inputs.items()}
    for name in ("q", "k", "v", "beta"):
        edited[name][:, -1] = 0.25
    edited["g"][:, -1] = -4.5
    before, after = (run(RULES[rule], each)["o"][:, :-1] for each in (inputs, edited))
    assert torch.equal(before, after)
