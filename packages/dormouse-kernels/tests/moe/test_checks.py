"""Every refusal of the expert passes: one sentence that names the op, the argument, what it got and the mend."""

from typing import Any

import pytest
import torch
from dormouse_kernels import glu_experts, latent_glu_experts, route


def arguments() -> dict[str, Any]:
    """Valid ones: T 4, d 6, r 3, f 5, E 2, k 2."""
    return {
        "hidden_states": torch.randn(4, 6),
        "gate_up_proj": torch.randn(2, 6, 6),
        "scale": torch.randn(2, 6),
        "v": torch.randn(2, 5, 3),
        "top_k_index": torch.zeros(4, 2, dtype=torch.int64),
        "top_k_weights": torch.randn(4, 2),
    }


def test_the_arguments_that_the_others_spoil_are_accepted():
    assert latent_glu_experts(**arguments()).shape == (4, 16)


INDEX = torch.zeros(4, 2, dtype=torch.int64)
REFUSED = [
    ("hidden_states", torch.randn(2, 2, 6), ValueError, r"hidden_states has shape \[2, 2, 6\]; flatten it to \[T, d\]"),
    ("hidden_states", torch.randn(4, 7), ValueError, r"hidden_states has shape \[4, 7\], expected \[T, d\] = \[4, 6\]"),
    ("hidden_states", torch.ones(4, 6, dtype=torch.int64), TypeError, "hidden_states is torch.int64; pass float64"),
    ("gate_up_proj", torch.randn(6, 6), ValueError, r"gate_up_proj has shape \[6, 6\]; pass \[E, 2r, d\]"),
    ("gate_up_proj", torch.randn(2, 5, 6), ValueError, r"gate_up_proj has shape .* = \[2, 6, 6\]"),
    ("gate_up_proj", torch.randn(0, 6, 6), ValueError, "gate_up_proj has shape .* which has an empty dimension"),
    ("gate_up_proj", torch.randn(2, 6, 6).mT, ValueError, r"gate_up_proj has strides .* pass gate_up_proj.contiguous"),
    ("scale", torch.randn(2, 3), ValueError, r"scale has shape \[2, 3\], expected \[E, 2r\] = \[2, 6\]"),
    ("scale", torch.randn(2, 6).to(torch.complex64), TypeError, "scale is torch.complex64; pass float64"),
    (
        "v",
        torch.randn(2, 3, 5),
        ValueError,
        r"gate_up_proj has shape \[2, 6, 6\], expected \[E, 2r, d\] = \[2, 10, 6\]",
    ),
    ("v", torch.randn(3, 5, 3), ValueError, r"v has shape \[3, 5, 3\], expected \[E, f, r\] = \[2, 5, 3\]"),
    ("v", torch.randn(2, 3, 5).mT, ValueError, r"v has strides .* pass v.contiguous\(\)"),
    ("v", torch.randn(2, 5, 3, device="meta"), ValueError, "v is on meta but hidden_states is on cpu; move one"),
    ("top_k_index", INDEX.float(), TypeError, "top_k_index is torch.float32; pass int32 or int64"),
    ("top_k_index", INDEX[:3], ValueError, r"top_k_index has shape \[3, 2\] for 4 tokens; pass \[T, k\]"),
    ("top_k_index", INDEX.to("meta"), ValueError, "top_k_index is on meta but hidden_states is on cpu"),
    ("top_k_weights", torch.randn(4, 1), ValueError, r"top_k_weights has shape \[4, 1\], expected \[T, k\] = \[4, 2\]"),
    ("top_k_weights", INDEX, TypeError, "top_k_weights is torch.int64; pass float64"),
    ("residual", torch.randn(4, 5), ValueError, r"residual has shape \[4, 5\], expected \[T, f_pad\] = \[4, 16\]"),
    ("capacity", 0, ValueError, "capacity is 0; pass at least 1, or None"),
    (
        "implementation",
        "grouped",
        ValueError,
        "implementation is 'grouped'; pass one of auto, reference, padded, triton",
    ),
    ("routing", route(INDEX, 3), ValueError, r"routing was made for 3 experts .* pass route\(top_k_index, 2\)"),
    ("routing", route(INDEX[:2], 2), ValueError, r"routing was made from top_k_index \[2, 2\].* got \[4, 2\]"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), REFUSED)
def test_a_wrong_argument_is_refused_by_name(name, value, error, message):
    with pytest.raises(error, match=message) as caught:
        latent_glu_experts(**{**arguments(), name: value})
    assert str(caught.value).startswith("latent_glu_experts: ")


def test_swiglu_experts_name_their_own_arguments():
    good = arguments()
    good["down_proj"] = torch.randn(2, 6, 3)
    del good["scale"], good["v"]
    assert glu_experts(**good).shape == (4, 6)
    good["down_proj"] = torch.randn(2, 5, 3)
    with pytest.raises(
        ValueError, match=r"glu_experts: down_proj has shape \[2, 5, 3\], expected \[E, D, I\] = \[2, 6, 3\]"
    ):
        glu_experts(**good)
    good["down_proj"] = torch.ones(2, 6, 3, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"glu_experts: down_proj is torch.int32"):
        glu_experts(**good)
