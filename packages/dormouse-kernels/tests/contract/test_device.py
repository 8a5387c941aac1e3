"""What only a GPU shows of the house rules: no sync, the same bits in twenty runs, capture by the caller, no memory."""

import pytest
import torch
from dormouse_kernels import latent_glu_experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SKEWED = torch.multinomial(1 / torch.arange(1, 65.0).expand(2000, -1), 2, generator=torch.Generator().manual_seed(0))
"""2000 tokens, 64 experts, Zipf: experts of one tile and of several."""


def capturable(op):
    """The implementation that a caller may capture: Triton's, or plain torch where there is no other."""
    return "triton" if "triton" in op.implementations else ""


def arguments_of(op):
    return op.arguments(SKEWED, 64, torch.bfloat16 if op.rows else torch.float32)


def test_nothing_syncs(op):
    arguments = arguments_of(op)
    op.differentiate(arguments, capturable(op))
    torch.cuda.set_sync_debug_mode("error")
    try:
        launch_only(op, arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def launch_only(op, arguments):
    """Results and gradients with nothing drawn on the host: the upstream gradient is ones."""
    leaves = {name: arguments[name].detach().requires_grad_() for name in op.leaves}
    results = op.run({**arguments, **leaves}, capturable(op))
    if not leaves:
        return results
    made = torch.autograd.grad(results["out"], list(leaves.values()), torch.ones_like(results["out"]))
    return {**results, **dict(zip(leaves, made, strict=True))}


def test_twenty_runs_give_the_same_bits(op):
    arguments = arguments_of(op)
    first = op.differentiate(arguments, capturable(op))
    for run in range(19):
        again = op.differentiate(arguments, capturable(op))
        for name in first:
            assert torch.equal(again[name], first[name]), f"{name} in run {run}"


def test_a_captured_graph_gives_the_eager_bits_again_for_new_values(op):
    arguments = arguments_of(op)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            launch_only(op, arguments)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = launch_only(op, arguments)
    for tensor in arguments.values():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.mul_(1.5)
    graph.replay()
    eager = launch_only(op, arguments)
    for name in eager:
        assert torch.equal(captured[name], eager[name]), name


def test_a_call_leaves_no_memory_behind(op, implementation):
    arguments = arguments_of(op)
    op.differentiate(arguments, implementation)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    op.differentiate(arguments, implementation)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_experts_without_rows_have_zero_gradients_beside_large_ones(routed):
    """The split of a public report: idle experts between those of 162, 2577, 446 and 83 rows."""
    index = torch.arange(6).repeat_interleave(torch.tensor([162, 0, 2577, 446, 0, 83])).unsqueeze(1)
    arguments = routed.arguments(index, 6)
    for _ in range(3):
        got = routed.differentiate(arguments, "triton")
        for name, rows in routed.rows.items():
            if rows == "expert":
                made = got[name if name == "out" else f"d {name}"]
                assert (made[[1, 4]] == 0).all(), name
                assert (made[[0, 2, 3, 5]] != 0).flatten(1).any(1).all(), name


def test_a_bank_of_more_than_two_billion_elements_is_reached_at_its_end():
    """V of 6200 experts, 2.17e9 elements: the last experts' rows, values and gradients as from those experts alone."""
    E, f, r, d, T = 6200, 5461, 64, 64, 24
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((T, d), (8, 2 * r, d), (8, 2 * r), (8, f, r), (T, 2))
    drawn = [torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    x, *banks, weights = drawn
    index = torch.randint(0, 8, (T, 2), generator=generator, device="cuda")
    large = [torch.cat([bank.new_zeros(E - 8, *bank.shape[1:]), bank]) for bank in banks]
    results = []
    for given, chosen in ((banks, index), (large, index + E - 8)):
        leaves = [bank.requires_grad_() for bank in given]
        out = latent_glu_experts(x, *leaves, chosen, weights, implementation="triton")
        results.append([out.detach(), *(grad[-8:] for grad in torch.autograd.grad(out, leaves, torch.ones_like(out)))])
    for name, small, end in zip(("out", "dU", "ds", "dV"), *results, strict=True):
        assert torch.equal(end, small), name
