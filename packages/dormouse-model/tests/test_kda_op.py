"""The operation behind its closed signature: what it refuses, what it chooses, what it counts."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from dormouse_kernels import Counters
from dormouse_model.kda import op, selection
from dormouse_model.kda.op import kda
from dormouse_model.kda.recurrent import recurrent_delta_rule
from dormouse_model.kda.selection import REASONS, Choice, choose, refuse_fallback
from dormouse_model.norm import unit

SERVED: dict[str, Any] = {
    "device_type": "cuda",
    "dtype": torch.bfloat16,
    "batch": 16,
    "length": 1024,
    "heads": 32,
    "head_dim": 64,
    "needs_grad": True,
    "lower_bound": -5.0,
    "fla_version": "0.5.2",
}
CASES: list[tuple[dict[str, Any], selection.Implementation, selection.Reason]] = [
    ({}, "fla", "supported"),
    ({"fla_version": "0.6.0"}, "fla", "supported"),
    ({"device_type": "cpu", "fla_version": None}, "bounded", "cpu_device"),
    ({"device_type": "cpu", "fla_version": None, "lower_bound": -5.1}, "chunk", "cpu_device"),
    ({"device_type": "cpu", "fla_version": None, "lower_bound": None}, "chunk", "cpu_device"),
    ({"length": 1, "needs_grad": False}, "recurrent", "one_byte"),
    ({"length": 1}, "fla", "supported"),
    ({"requested": "torch"}, "bounded", "forced"),
    ({"requested": "torch", "lower_bound": None}, "chunk", "forced"),
    ({"requested": "recurrent"}, "recurrent", "forced"),
    ({"requested": "fla"}, "fla", "forced"),
    ({"fla_version": None}, "bounded", "fla_missing"),
    ({"fla_version": "0.4.2"}, "bounded", "fla_version"),
    ({"fla_version": "0.7.0"}, "bounded", "fla_version"),
    ({"dtype": torch.float32}, "bounded", "dtype"),
    ({"head_dim": 8}, "bounded", "head_dim"),
    ({"head_dim": 257}, "bounded", "head_dim"),
    ({"batch": 2048}, "bounded", "grid_limit"),
    ({"length": 65_536}, "bounded", "int32_offsets"),
]


def asked(**changes: Any) -> Choice:
    """The choice for a call that a kernel serves, but for `changes`."""
    return choose(**(SERVED | changes))


@pytest.mark.parametrize(("changes", "implementation", "reason"), CASES)
def test_each_call_gets_its_implementation_and_reason(changes, implementation, reason):
    assert asked(**changes) == Choice(implementation, reason)


def test_every_reason_of_the_closed_list_has_a_case():
    assert {reason for _, _, reason in CASES} == set(REASONS)


def test_only_torch_in_the_place_of_a_kernel_is_a_fallback():
    fallbacks = {reason for _, name, reason in CASES if Choice(name, reason).is_fallback}
    assert fallbacks == {"fla_missing", "fla_version", "dtype", "head_dim", "grid_limit", "int32_offsets"}


def test_a_fallback_on_cuda_raises_with_its_reason_unless_allowed():
    choice = asked(head_dim=8)
    with pytest.raises(RuntimeError, match=r"head_dim.*kda\.allow_fallback = true"):
        refuse_fallback(choice, allowed=False)
    refuse_fallback(choice, allowed=True)
    with pytest.raises(RuntimeError, match=r"\(dtype\).*run it under torch\.autocast in bf16"):
        refuse_fallback(asked(dtype=torch.float32), allowed=False)
    for _, implementation, reason in CASES:
        with contextlib.suppress(RuntimeError):
            refuse_fallback(Choice(implementation, reason), allowed=False)
    refuse_fallback(asked(device_type="cpu"), allowed=False)


def test_asking_for_a_kernel_that_cannot_serve_is_refused():
    with pytest.raises(ValueError, match="cpu_device"):
        asked(device_type="cpu", requested="fla")
    with pytest.raises(ValueError, match="'flaa' does not exist; choose auto, fla, torch or recurrent"):
        asked(requested="flaa")


def test_the_limits_are_those_of_the_kernels():
    assert asked(batch=65_535, heads=1, length=64).implementation == "fla"
    assert asked(batch=65_536, heads=1, length=64).reason == "grid_limit"
    assert selection.MAX_ELEMENTS == 2**31 - 1


def arguments(length: int = 5, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    source = torch.Generator().manual_seed(0)
    q, k, v, gate = (torch.randn(2, length, 3, 8, generator=source).to(dtype) for _ in range(4))
    return {"q": q, "k": k, "v": v, "gate": gate, "beta": torch.rand(2, length, 3, generator=source).to(dtype)}


GATED: dict[str, Any] = {"A_log": torch.zeros(3), "dt_bias": torch.zeros(24), "lower_bound": -5.0}


def test_a_misspelt_option_is_refused():
    with pytest.raises(TypeError, match="dtbias"):
        kda(**arguments(), **GATED, dtbias=torch.zeros(24))  # ty: ignore[unknown-argument]


def test_gate_parameters_without_their_switch_are_refused():
    with pytest.raises(ValueError, match="dt_bias was given without A_log"):
        kda(**arguments(), dt_bias=torch.zeros(24))
    with pytest.raises(ValueError, match="A_log was given without lower_bound"):
        kda(**arguments(), A_log=torch.zeros(3))
    with pytest.raises(ValueError, match="lower_bound must be negative, got 5"):
        kda(**arguments(), A_log=torch.zeros(3), lower_bound=5.0)


def test_a_given_decay_below_its_bound_is_refused():
    given = arguments()
    given["gate"] = -given["gate"].abs().clamp(max=4.9)
    kda(**given, lower_bound=-5.0)
    given["gate"][1, 2, 0, 3] = -5.1
    with pytest.raises(ValueError, match=r"gate goes below lower_bound -5\.0"):
        kda(**given, lower_bound=-5.0)
    kda(**given)


def test_a_state_that_is_not_fp32_is_refused():
    state = torch.zeros(2, 3, 8, 8, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"initial_state must be fp32, got torch\.bfloat16"):
        kda(**arguments(), **GATED, initial_state=state)


def test_low_precision_inputs_come_back_in_their_dtype_with_an_fp32_state():
    output, state = kda(**arguments(dtype=torch.bfloat16), **GATED)
    assert (output.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    exact, _ = kda(**{n: t.float() for n, t in arguments(dtype=torch.bfloat16).items()}, **GATED)
    assert torch.equal(output, exact.to(torch.bfloat16))


def test_calls_are_counted_by_implementation_and_phase():
    with Counters() as counters, torch.no_grad():
        kda(**arguments(5), **GATED)
        with counters.phase("recompute"):
            kda(**arguments(5), **GATED)
        kda(**arguments(1), **GATED)
    assert counters.snapshot() == {"kda/forward/bounded": 1, "kda/recompute/bounded": 1, "kda/decode/recurrent": 1}
    assert counters.fallbacks() == 0


@pytest.mark.parametrize(("bound", "name"), [(-5.0, "bounded"), (-6.0, "chunk"), (None, "chunk")])
def test_what_is_counted_is_what_ran(bound, name, monkeypatch):
    ran = []
    for each, rule in op.RULES.items():
        monkeypatch.setitem(op.RULES, each, lambda *a, each=each, rule=rule, **o: ran.append(each) or rule(*a, **o))
    given = arguments(5)
    given["gate"] = -given["gate"].abs().clamp(max=4.9)
    with Counters() as counters:
        kda(**given, lower_bound=bound)
    assert ran == [name]
    assert counters.snapshot() == {f"kda/forward/{name}": 1}


def test_a_single_byte_equals_the_chunk_of_one():
    with torch.no_grad():
        one, state = kda(**arguments(1), **GATED)
        chunk, chunk_state = kda(**arguments(1), **GATED, implementation="torch")
    torch.testing.assert_close(one, chunk, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state, chunk_state, rtol=1e-6, atol=1e-6)


def test_a_single_byte_that_needs_a_gradient_gets_one():
    given = arguments(1)
    given["q"].requires_grad_()
    with Counters() as counters:
        output, _ = kda(**given, **GATED)
    assert counters.snapshot() == {"kda/forward/bounded": 1}
    assert output.requires_grad


@pytest.mark.parametrize("bounded", [True, False])
def test_it_is_the_recurrence_of_unit_queries_and_keys_scaled_by_the_root_of_their_size(bounded):
    given = arguments(9)
    given["gate"] = -given["gate"].abs().clamp(max=4.9)
    want, want_state = recurrent_delta_rule(
        unit(given["q"]), unit(given["k"]), given["v"], given["gate"], given["beta"], scale=8**-0.5
    )
    got, state = kda(**given, lower_bound=-5.0 if bounded else None)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, want_state, rtol=1e-5, atol=1e-6)


def test_the_gate_is_the_bounded_sigmoid():
    source = torch.Generator().manual_seed(0)
    A_log, dt_bias = torch.randn(3, generator=source), torch.randn(24, generator=source)
    given = arguments(9)
    inside, _ = kda(**given, A_log=A_log, dt_bias=dt_bias, lower_bound=-5.0)
    slope = A_log.exp()[:, None]
    outside: dict[str, Any] = given | {"gate": -5.0 * torch.sigmoid(slope * (given["gate"] + dt_bias.view(3, 8)))}
    torch.testing.assert_close(inside, kda(**outside)[0], rtol=1e-5, atol=1e-6)
