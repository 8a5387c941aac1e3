"""The house rules, over every op of the table in conftest.py and every implementation of it."""

import gc
import inspect
import subprocess
import sys
import types
import weakref
from pathlib import Path

import dormouse_kernels
import pytest
import torch
from dormouse_kernels import Counters, grouped_wgrad, muon, route
from dormouse_kernels.proof import relative_errors, surrounded

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPREAD = torch.tensor([[0, 2], [2, 1], [0, 2], [1, 0], [2, 0]])
ROUTINGS = {
    "every expert": (SPREAD, 3),
    "no tokens": (torch.empty(0, 2, dtype=torch.int64), 3),
    "one expert": (torch.zeros(3, 1, dtype=torch.int64), 1),
    "all rows to one, two tiles": (torch.full((17, 1), 1), 3),
    "sentinels, twice one expert, int32": (torch.tensor([[-1, 2], [3, 0], [0, 0], [9, -7]], dtype=torch.int32), 3),
    "only sentinels": (torch.tensor([[-1, 3], [2**40, 3]]), 3),
}
BOUND = 3e-6
"""fp32 against fp64, relative L2 of each tensor and of each expert's part: the parity table's."""


def by_expert(op):
    return [name if name == "out" else f"d {name}" for name, rows in op.rows.items() if rows == "expert"]


def assert_same_bits(got, want):
    assert got.keys() == want.keys()
    for name in got:
        assert torch.equal(got[name], want[name]), name


def test_every_public_function_has_a_row(table):
    modules = (dormouse_kernels, muon)
    public = {getattr(module, name) for module in modules for name in module.__all__}
    functions = {each for each in public if inspect.isfunction(each)}
    assert functions - {dormouse_kernels.explain} == {op.function for op in table}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_results_and_gradients_on_poisoned_memory_are_the_oracles_for_any_routing(routed, implementation, routing):
    arguments = routed.arguments(*ROUTINGS[routing])
    errors = relative_errors(
        routed.differentiate(arguments, implementation), routed.wanted(arguments), by_expert=by_expert(routed)
    )
    assert all(error <= BOUND for error in errors.values()), errors


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_route_sorts_any_routing_as_python_does(implementation, routing):
    index, experts = ROUTINGS[routing]
    flat = [expert if 0 <= expert < experts else experts for expert in index.flatten().tolist()]
    got = route(index.to(DEVICE), experts, implementation=implementation)
    assert got.order.tolist() == sorted(range(len(flat)), key=lambda slot: (flat[slot], slot))
    assert got.inverse.tolist() == [got.order.tolist().index(slot) for slot in range(len(flat))]
    assert got.counts.tolist() == [flat.count(expert) for expert in range(experts)]
    assert got.offsets.tolist() == [sum(got.counts[:expert].tolist()) for expert in range(experts + 1)]


def test_the_reference_passes_gradcheck(routed):
    arguments = routed.arguments(SPREAD[:3], 3, torch.float64)
    leaves = [arguments[name].requires_grad_() for name in routed.leaves]

    def of_leaves(*given):
        return routed.run({**arguments, **dict(zip(routed.leaves, given, strict=True))}, "reference")["out"]

    assert torch.autograd.gradcheck(of_leaves, leaves, fast_mode=True)


def test_inputs_are_never_written(op, implementation):
    arguments = op.arguments()
    before = {name: (tensor.clone(), tensor._version) for name, tensor in tensors_in(arguments).items()}
    op.differentiate(arguments, implementation)
    for name, tensor in tensors_in(arguments).items():
        assert torch.equal(tensor, before[name][0]), name
        assert tensor._version == before[name][1], name


def tensors_in(arguments):
    found = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    if "routing" in arguments:
        found |= {name: getattr(arguments["routing"], name) for name in ("counts", "offsets", "order", "inverse")}
    return found


def test_the_first_and_the_second_call_give_the_same_bits(op, implementation):
    arguments = op.arguments()
    assert_same_bits(op.differentiate(arguments, implementation), op.differentiate(arguments, implementation))


def sliced(grad):
    return torch.cat([grad, grad.new_full(grad.shape, torch.nan)], dim=-1)[..., : grad.shape[-1]]


def of_stride_zero(grad):
    return grad.flatten()[0].expand_as(grad)


def test_any_layout_of_the_upstream_gradient_gives_the_same_gradients(routed, implementation):
    arguments = routed.arguments()
    for layout, values in ((sliced, torch.Tensor.contiguous), (of_stride_zero, of_stride_zero)):
        got = routed.differentiate(arguments, implementation, layout)
        want = routed.differentiate(arguments, implementation, lambda grad, v=values: v(grad).contiguous())
        errors = relative_errors(got, want, by_expert=by_expert(routed))
        assert all(error <= 1e-6 for error in errors.values()), (layout.__name__, errors)


def test_a_nan_token_reaches_its_own_rows_and_its_own_experts_alone(routed, implementation, rows_of_token):
    # expert 0 has the fewest rows, and behind its own lie those of the spoiled token
    arguments = routed.arguments(torch.tensor([[1, 3], [0, 2], [2, 1]]), 4)
    routing = arguments.get("routing") or route(arguments["top_k_index"], 4)
    want = routed.differentiate(arguments, implementation)
    tokens = routed.leaves[0]
    arguments[tokens][rows_of_token(routed.rows[tokens], routing, 0)] = torch.nan
    got = routed.differentiate(arguments, implementation)
    assert got["out"][rows_of_token(routed.rows["out"], routing, 0)].isnan().any()
    for name, rows in routed.rows.items():
        name = name if name == "out" else f"d {name}"
        kept = sorted(set(range(len(got[name]))) - set(rows_of_token(rows, routing, 0)))
        assert torch.equal(got[name][kept], want[name][kept]), name


def test_a_row_of_no_expert_is_never_read(routed, implementation, rows_of_token):
    index = torch.tensor([[0, 2], [-1, 9], [2, 1]])
    arguments = routed.arguments(index, 3)
    routing = arguments.get("routing") or route(arguments["top_k_index"], 3)
    want = routed.differentiate(arguments, implementation)
    for name, rows in routed.rows.items():
        # a residual's row is the token's own, whatever its experts
        if rows != "expert" and name not in ("out", "residual"):
            arguments[name][rows_of_token(rows, routing, 1)] = torch.nan
    assert_same_bits(routed.differentiate(arguments, implementation), want)


def test_nothing_beside_an_input_in_memory_is_read(routed, implementation):
    arguments = routed.arguments()
    inside = {name: surrounded(arguments[name]) for name in routed.leaves}
    got = routed.differentiate({**arguments, **inside}, implementation)
    assert_same_bits(got, routed.differentiate(arguments, implementation))


def test_every_implementation_counts_the_same(routed):
    arguments = routed.arguments(*ROUTINGS["sentinels, twice one expert, int32"])
    counted = {}
    for implementation in routed.implementations:
        with Counters() as counters:
            routed.differentiate(arguments, implementation)
        counted[implementation] = {
            key.replace(implementation, "*"): count for key, count in counters.snapshot().items()
        }
    site = f"moe.{routed.function.__name__}/forward"
    assert counted == {each: {f"{site}/*": 1, f"{site}/bad_index": 4} for each in routed.implementations}


def test_where_a_capacity_drops_the_rows_and_their_count_are_the_same(routed):
    if "capacity" not in inspect.signature(routed.function).parameters:
        with pytest.raises(TypeError, match="capacity"):
            routed.function(**routed.arguments(), capacity=1)
        return
    arguments = {**routed.arguments(), "capacity": 2}
    want = routed.wanted(arguments)
    for implementation in ("reference", "padded"):
        with Counters() as counters:
            got = routed.differentiate(arguments, implementation)
        errors = relative_errors(got, want, by_expert=by_expert(routed))
        assert all(error <= BOUND for error in errors.values()), (implementation, errors)
        # the experts have 4, 2 and 4 rows
        assert counters.snapshot()[f"moe.{routed.name}/forward/dropped"] == 4
    with pytest.raises(ValueError, match=r"implementation='triton' cannot take capacity=2.*; pass implementation="):
        routed.run(arguments, "triton")


def test_out_is_refused_while_a_gradient_is_needed(table):
    with_out = {op.function for op in table if "out" in inspect.signature(op.function).parameters}
    assert with_out == {grouped_wgrad}
    for op in (op for op in table if op.function is grouped_wgrad):
        for name in op.leaves:
            arguments = {**op.arguments(), "out": torch.empty(3, 6, 5, device=op.arguments()["a"].device)}
            arguments[name].requires_grad_()
            with pytest.raises(ValueError, match=r"grouped_wgrad: out is given while a gradient is needed; call it"):
                op.run(arguments)
            with torch.no_grad():
                assert op.run(arguments)["out"] is arguments["out"]


@pytest.mark.parametrize("name", ["latent_glu_experts", "glu_experts"])
def test_no_constant_of_an_expert_kernel_depends_on_the_number_of_rows(name):
    """Each would be a compilation of its own: as many as there are batch sizes."""
    from dormouse_kernels.moe.grouped.tiles import SM_120 as grouped_tiles
    from dormouse_kernels.moe.latent.tiles import SM_120 as latent_tiles
    from dormouse_kernels.tune.problem import Problem, builds

    tiles = latent_tiles if name == "latent_glu_experts" else grouped_tiles
    constants: dict[tuple[str, int], set[tuple[tuple[str, object], ...]]] = {}
    for rows in (1, 3, 16, 17, 1000, 1024, 16384):
        problem = Problem(name, T=rows, d=64, r=64, f=96, experts=8, k=2, dtype=torch.bfloat16)
        for at, build in enumerate(builds(problem, tiles, 120)):
            named = inspect.signature(build.kernel.fn).parameters
            fixed = tuple((n, v) for n, v in build.arguments.items() if "constexpr" in str(named[n].annotation))
            constants.setdefault((build.kernel.fn.__name__, at), set()).add(fixed)
    assert len(constants) > 5
    assert [kernel for kernel, seen in constants.items() if len(seen) > 1] == []
    assert all(seen != {()} for seen in constants.values())


ATOMIC = {"moe/routing/kernels.py", "moe/latent/turns.py"}
"""Arrivals, tickets and flags: integers, whose sums have no order."""


def test_only_integers_are_added_atomically():
    root = Path(dormouse_kernels.__file__).parent
    sources = {str(path.relative_to(root)): path.read_text() for path in root.rglob("*.py")}
    assert {name for name, source in sources.items() if "tl.atomic_" in source} == ATOMIC


def module_state():
    """Every global of the package by its identity, containers also by their size and caches by theirs."""
    state = {}
    for module in [m for name, m in sys.modules.items() if name.partition(".")[0] == "dormouse_kernels"]:
        for name, value in vars(module).items():
            if name.startswith("__") or isinstance(value, types.ModuleType):
                continue
            size = len(value) if isinstance(value, dict | list | set) else None
            cached = value.cache_info().currsize if hasattr(value, "cache_info") else None
            state[f"{module.__name__}.{name}"] = (id(value), size, cached)
    return state


def test_a_call_leaves_the_globals_of_every_module_as_they_were(op, implementation):
    op.differentiate(op.arguments(), implementation)
    before = module_state()
    # sizes that no call had before
    op.differentiate(op.arguments(SPREAD.repeat(2, 1), 4), implementation)
    assert module_state() == before
    assert len(before) > 50


def live_tensors():
    gc.collect()
    return [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]


def test_no_tensor_outlives_its_results(op, implementation):
    # of sizes that no call had before, so that a workspace kept from one would not do
    arguments = op.arguments(torch.cat([SPREAD, SPREAD[:2]]), 4)
    before = {id(each): weakref.ref(each) for each in live_tensors()}
    op.differentiate(arguments, implementation)
    assert [each.shape for each in live_tensors() if before.get(id(each), lambda: None)() is not each] == []


PROBE = """
import os, sys
import torch
import torch.library
read = []
kept = type(os.environ).__getitem__
type(os.environ).__getitem__ = lambda self, key: (read.append(key), kept(self, key))[1]
before = torch.get_default_dtype(), torch.get_num_threads(), torch.random.initial_seed()
import dormouse_kernels
import dormouse_kernels.integrations.transformers
assert read == [], f"read {read}"
heavy = [name for name in ("triton", "transformers") if name in sys.modules]
assert heavy == [], f"imported {heavy}"
assert not torch.cuda.is_initialized(), "touched CUDA"
assert before == (torch.get_default_dtype(), torch.get_num_threads(), torch.random.initial_seed())
"""


def test_importing_the_package_reads_nothing_touches_nothing_and_imports_no_triton():
    ran = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
