"""What no op takes, spoiled one argument at a time: each error names the op, an argument, what it got and the mend."""

import re
from typing import Any

import pytest
import torch

MEND = r"; (pass|move|flatten|call) "


def tensors_of(arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}


def assert_refused(op, arguments, implementation, got, what):
    """`got`: what the message may say that it got, as regular expressions."""
    with pytest.raises((ValueError, TypeError)) as caught:
        op.run(arguments, implementation)
    message = str(caught.value)
    assert message.startswith(f"{op.function.__name__}: "), f"{what}: {message}"
    named = [name for name in arguments if re.search(rf"\b{name}\b", message)]
    assert named, f"{what}: no argument is named: {message}"
    assert any(re.search(each, message) for each in got), f"{what}: it does not say what it got: {message}"
    assert re.search(MEND, message), f"{what}: it does not say what to do: {message}"


def shapes_of(arguments):
    """How a message may write the sizes of the tensors it names: whole shapes, or one size."""
    shapes = [list(tensor.shape) for tensor in tensors_of(arguments).values()]
    return [re.escape(str(shape)) for shape in shapes] + [re.escape(str(tuple(shape))) for shape in shapes]


def test_a_tensor_of_another_dtype_is_refused(op, implementation):
    for name, tensor in tensors_of(op.arguments()).items():
        wrong = torch.complex64 if tensor.is_floating_point() else torch.float32
        arguments = {**op.arguments(), name: tensor.to(wrong)}
        assert_refused(op, arguments, implementation, [re.escape(str(wrong))], f"{name} of {wrong}")


def test_a_tensor_on_another_device_is_refused(op, implementation):
    tensors = tensors_of(op.arguments())
    for name in tensors if len(tensors) > 1 or "routing" in op.arguments() else ():
        arguments = {**op.arguments(), name: tensors[name].to("meta")}
        assert_refused(op, arguments, implementation, ["on meta"], f"{name} on meta")


def test_a_tensor_of_another_rank_is_refused(op, implementation):
    for name, tensor in tensors_of(op.arguments()).items():
        for dimensions, spoiled in ((tensor.dim() + 1, tensor.unsqueeze(0)), (1, tensor.flatten())):
            if (name, -1) in op.free and (dimensions != 1 or (name, 0) in op.free):
                continue
            arguments = {**op.arguments(), name: spoiled}
            assert_refused(op, arguments, implementation, shapes_of(arguments), f"{name} of rank {dimensions}")


def test_a_size_that_does_not_fit_the_others_is_refused(op, implementation):
    for name, tensor in tensors_of(op.arguments()).items():
        for dimension, size in enumerate(tensor.shape):
            if (name, dimension) in op.free or (name, -1) in op.free:
                continue
            arguments = {**op.arguments(), name: tensor.narrow(dimension, 0, size - 1).contiguous()}
            got = [*shapes_of(arguments), rf"\b{size - 1}\b"]
            assert_refused(op, arguments, implementation, got, f"{name} with {size - 1} of {size} in {dimension}")


@pytest.mark.parametrize("arranged", ["transposed", "every second"])
def test_any_stride_is_taken_with_the_same_result_or_refused(op, implementation, arranged):
    want = op.run(op.arguments(), implementation)
    refused = []
    for name, tensor in tensors_of(op.arguments()).items():
        if arranged == "transposed":
            spoiled = tensor.mT.contiguous().mT
        else:
            spoiled = torch.stack([tensor, torch.zeros_like(tensor)], dim=-1).flatten(-2)[..., ::2]
        assert spoiled.stride() != tensor.stride()
        arguments = {**op.arguments(), name: spoiled}
        try:
            got = op.run(arguments, implementation)
        except ValueError:
            assert_refused(op, arguments, implementation, [re.escape(str(spoiled.stride()))], f"{name} {arranged}")
            refused.append(name)
            continue
        for result in want:
            torch.testing.assert_close(got[result], want[result], msg=lambda text, n=name: f"{n} {arranged}: {text}")
    latent = ["gate_up_proj", "scale", "v"] if implementation == "triton" else ["gate_up_proj", "v"]
    expected = {"latent_glu_experts": latent, "glu_experts": ["gate_up_proj", "down_proj"]}
    assert refused == expected.get(op.name, [])


def test_an_unknown_implementation_is_refused_with_the_list(op):
    if op.implementations == ("",):
        return
    with pytest.raises(ValueError, match=f"^{op.function.__name__}: implementation is 'fast'; pass one of ") as caught:
        op.run(op.arguments(), "fast")
    assert all(name in str(caught.value) for name in ("auto", *op.implementations))


def test_a_routing_of_other_experts_or_other_tokens_is_refused(routed, implementation):
    index = torch.tensor([[0, 2], [2, 1]])
    for made, what in ((routed.arguments(num_experts=4), "4 experts"), (routed.arguments(index), "2 tokens")):
        routing = made.get("routing")
        if routing is None:
            from dormouse_kernels import route

            routing = route(made["top_k_index"], made["gate_up_proj"].shape[0])
        arguments = {**routed.arguments(), "routing": routing}
        if what == "4 experts" and routed.function.__name__ == "grouped_wgrad":
            continue  # its result takes the routing's experts
        got = [r"\b4 experts", r"\[2, 2\]", *shapes_of(arguments)]
        assert_refused(routed, arguments, implementation, got, f"a routing of {what}")
