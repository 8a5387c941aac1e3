"""The KDA operation behind a closed signature: gate, normalisation and delta rule, whoever computes them.

Letters: `B` sequences, `T` bytes, `H` heads, `K` size of a key and of a value.
"""

from __future__ import annotations

import functools
from importlib import metadata

import torch
from dormouse_kernels import counters
from torch import Tensor

from dormouse_model.kda import selection
from dormouse_model.kda.bounded import bounded_chunk_delta_rule
from dormouse_model.kda.chunk import chunk_delta_rule
from dormouse_model.kda.recurrent import recurrent_delta_rule
from dormouse_model.norm import unit

RULES = {"bounded": bounded_chunk_delta_rule, "chunk": chunk_delta_rule, "recurrent": recurrent_delta_rule}


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    initial_state: Tensor | None = None,
    implementation: selection.Requested = "auto",
    allow_fallback: bool = False,
) -> tuple[Tensor, Tensor]:
    """`S_t = (I - beta_t k_t k_t^T) e^(g_t) S_(t-1) + beta_t k_t v_t^T`, `o_t = K^(-1/2) q_t S_t`; |q| = |k| = 1.

    `q`, `k`, `v`, `gate` [B, T, H, K], one dtype; `beta` [B, T, H] in [0, 1]. With `A_log` [H] fp32, `gate` is a raw
    logit and `g = lower_bound * sigmoid(e^(A_log) (gate + dt_bias))`, `dt_bias` [H*K] fp32; without it `gate` is `g`
    itself, at most 0. `initial_state` [B, H, K, K] fp32, None is zeros. Returns `o` [B, T, H, K] in q's dtype and the
    final state.
    Saved for the backward: what the implementation saves; nothing here.
    Errors: `ValueError` for gate parameters without `A_log`, `A_log` without a bound, or a given `g` below
    `lower_bound`; `TypeError` for a state that is not fp32; `RuntimeError` where a CUDA call would fall back and
    `allow_fallback` is false.
    """
    _check(gate, A_log, dt_bias, lower_bound, initial_state, q.dtype)
    batch, length, heads, size = q.shape
    needs_grad = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (q, k, v, gate, beta, A_log, dt_bias, initial_state)
    )
    choice = selection.choose(
        device_type=q.device.type,
        dtype=q.dtype,
        batch=batch,
        length=length,
        heads=heads,
        head_dim=size,
        needs_grad=needs_grad,
        lower_bound=lower_bound,
        fla_version=fla_version() if q.device.type == "cuda" else None,
        requested=implementation,
    )
    selection.refuse_fallback(choice, allow_fallback)
    counter = counters.current()
    if counter is not None:
        phase = "decode" if choice.implementation == "recurrent" and choice.reason == "one_byte" else None
        counter.count("kda", choice.implementation, phase=phase, reason=choice.reason if choice.is_fallback else "")
    if choice.implementation == "fla":
        return _fla(q, k, v, gate, beta, A_log, dt_bias, lower_bound, initial_state)
    dtype = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        q, k = (unit(t.to(dtype)) for t in (q, k))
        g = gate.to(dtype) if A_log is None else log_decay(gate.to(dtype), A_log, dt_bias, lower_bound)
        rule = RULES[choice.implementation]
        output, state = rule(q, k, v.to(dtype), g, beta.to(dtype), scale=size**-0.5, initial_state=initial_state)
    return output.to(v.dtype), state


def log_decay(gate: Tensor, A_log: Tensor, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """`lower_bound * sigmoid(e^(A_log) (gate + dt_bias))`, [B, T, H, K]."""
    assert lower_bound is not None
    slope = A_log.exp().unsqueeze(-1)
    raw = gate * slope if dt_bias is None else torch.addcmul(slope * dt_bias.view(gate.shape[-2:]), gate, slope)
    return raw.sigmoid() * lower_bound


@functools.lru_cache(maxsize=1)  # a look-up takes 3 ms
def fla_version() -> str | None:
    """The installed version of fla-core, read from its metadata without importing it; None where it is absent."""
    try:
        return metadata.version("fla-core")
    except metadata.PackageNotFoundError:
        return None


def _check(
    gate: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor | None,
    dtype: torch.dtype,
) -> None:
    if A_log is None and dt_bias is not None:
        raise ValueError(
            "kda: dt_bias was given without A_log, so no gate would use it; give A_log too, or fold it into gate"
        )
    if A_log is not None and lower_bound is None:
        raise ValueError("kda: A_log was given without lower_bound; pass lower_bound=-5.0")
    if lower_bound is not None and lower_bound >= 0:
        raise ValueError(f"kda: lower_bound must be negative, got {lower_bound}")
    if A_log is None and lower_bound is not None and gate.numel() and gate.min() < lower_bound:
        raise ValueError(f"kda: gate goes below lower_bound {lower_bound}; clamp it or pass lower_bound=None")
    if initial_state is not None and initial_state.dtype != torch.promote_types(dtype, torch.float32):
        raise TypeError(f"kda: initial_state must be fp32, got {initial_state.dtype}; pass initial_state.float()")


def _fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """flash-linear-attention's chunked kernels.

    `safe_gate=True` of 0.5.2 anchors its exponents on a later byte and so lets the past read the future (fla #1240).
    """
    from fla.ops.kda import chunk_kda  # 43 s on two cores: only where a CUDA device runs it

    return chunk_kda(
        q,
        k,
        v,
        gate,
        beta,
        scale=q.shape[-1] ** -0.5,
        initial_state=initial_state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=A_log is not None,
        safe_gate=False,
        lower_bound=lower_bound if A_log is not None else None,
        A_log=None if A_log is None else A_log.float(),
        dt_bias=None if dt_bias is None else dt_bias.float(),
    )
