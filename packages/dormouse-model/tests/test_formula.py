"""The model and its mixer written out line by line from their weights, in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from dormouse_model import Dormouse
from dormouse_model.engram.ngrams import ngram_rows
from dormouse_model.kda import KDA
from dormouse_model.kda.recurrent import recurrent_delta_rule
from dormouse_model.norm import RMS_EPS, UNIT_EPS
from dormouse_model.router import balance_loss
from torch import Tensor


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + RMS_EPS).sqrt() * weight


def mixer(kda: KDA, u: Tensor) -> Tensor:
    """The KDA layer for one sequence from its start, `u` [B, T, d]."""
    weights = dict(kda.named_parameters())

    def linear(x: Tensor, *names: str) -> Tensor:
        for name in names:
            x = x @ weights[f"{name}.weight"].mT
        return x

    def mixed(name: str) -> Tensor:
        projected = F.pad(linear(u, f"{name}_proj").mT, (3, 0))
        return F.silu(F.conv1d(projected, weights[f"{name}_conv.weight"], groups=24)).mT.unflatten(-1, (3, 8))

    def unit(x: Tensor) -> Tensor:
        return x / (x.square().sum(-1, keepdim=True) + UNIT_EPS).sqrt()

    slope = weights["A_log"].exp().repeat_interleave(8)
    decay = -5 * torch.sigmoid(slope * (linear(u, "decay_down", "decay_up") + weights["dt_bias"]))
    output, _ = recurrent_delta_rule(
        unit(mixed("q")),
        unit(mixed("k")),
        mixed("v"),
        decay.unflatten(-1, (3, 8)),
        linear(u, "beta_proj").sigmoid(),
        scale=8**-0.5,
    )
    gate = torch.sigmoid(linear(u, "gate_down", "gate_up") + weights["gate_up.bias"])
    return linear(rms(output, weights["norm.weight"]).flatten(-2) * gate, "o_proj")


def engram(model: Dormouse, ids: Tensor, u: Tensor) -> Tensor:
    """Engram from its rows, for one sequence after another, `u` [B, T, d]."""
    layer = model.block.memory.engram
    assert layer is not None
    w, orders = dict(layer.named_parameters()), (1, 2, 4)
    starts, read = {1: 0, 2: 256, 4: 556}, u.new_zeros(*ids.shape, 3, 8)
    for b, text in enumerate(ids.tolist()):
        for t in range(len(text)):
            for i, n in enumerate(orders):
                if t + 1 >= n:
                    gram = torch.tensor([text[t + 1 - n : t + 1]])
                    row = ngram_rows(gram, torch.full((1, 3), -1), n, 300, 0)[0, -1]
                    read[b, t, i] = w["tables"][starts[n] + row]
    key, value = (read.flatten(-2) @ w[f"{name}.weight"].mT for name in ("key", "value"))
    affinity = (rms(u, w["query_norm.weight"]) * rms(key, w["key_norm.weight"])).sum(-1, keepdim=True) / 24**0.5
    taken = affinity.sigmoid() * value
    normed = F.pad(rms(taken, w["conv_norm.weight"]).mT, (3, 0))
    return taken + F.silu(F.conv1d(normed, w["conv.weight"], groups=24)).mT


@pytest.fixture
def model(tiny: Dormouse) -> Dormouse:
    """Tiny, in fp64, no parameter at a value that hides it: no norm weight or alpha of 1, no A_log or bias of 0."""
    source = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in tiny.named_parameters():
            if name == "alpha" or name.endswith(("norm.weight", "A_log", "bias")):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=source))
    return tiny.double()


def test_the_mixer_is_its_formula(model):
    u = torch.randn(2, 19, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(model.block.kda(u)[0], mixer(model.block.kda, u))


def test_the_model_is_its_formula(model, bytes_of):
    ids, block = bytes_of(2, 19), model.block
    x = model.embedding.weight[ids.long()]
    h, out, losses = x, torch.zeros_like(x), []
    for i in range(2):
        u = rms(h + model.iteration_embedding[i], block.norm.weight)
        ga, gm, gf = torch.sigmoid(torch.cat([u, x], -1) @ block.controller.weight.mT).split(1, -1)
        experts, _, counts = block.experts(u.flatten(0, 1))
        memory = 0.5 * gm * engram(model, ids, u) + (1 - 0.5 * gm) * (u @ block.memory.weight.mT)
        h = h + model.alpha * (ga * mixer(block.kda, u) + memory + gf * experts.view_as(u))
        out = out + h @ model.readout.weight.mT
        losses.append(balance_loss(block.experts.router(u.flatten(0, 1)).probabilities, counts))
    output = model(ids)
    torch.testing.assert_close(output.logits, rms(out, model.norm.weight) @ model.head.weight.mT)
    torch.testing.assert_close(output.balance_loss, (losses[0] + losses[1]) / 2)
