"""Routing: stable, sized by (T, k, E) alone, sentinels last."""

import inspect

import dormouse_kernels
import pytest
import torch
from dormouse_kernels import route
from dormouse_kernels.moe.routing import kernels, sort
from dormouse_kernels.moe.routing.sort import cut_tiles
from dormouse_kernels.moe.routing.tilemap import cut
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9).flatmap(
        lambda experts: st.tuples(
            st.just(experts),
            st.integers(1, 4).flatmap(
                lambda k: st.lists(
                    st.lists(st.integers(-2, experts + 1), min_size=k, max_size=k), min_size=1, max_size=20
                )
            ),
        )
    )
)
def test_rows_are_the_slots_sorted_by_expert_and_then_by_slot(drawn):
    num_experts, index = drawn
    flat = [expert if 0 <= expert < num_experts else num_experts for row in index for expert in row]
    order = sorted(range(len(flat)), key=lambda slot: (flat[slot], slot))
    counts = [flat.count(expert) for expert in range(num_experts)]
    routing = route(torch.tensor(index), num_experts)
    assert routing.order.tolist() == order
    assert routing.inverse.tolist() == [order.index(slot) for slot in range(len(flat))]
    assert routing.counts.tolist() == counts
    assert routing.offsets.tolist() == [sum(counts[:expert]) for expert in range(num_experts + 1)]
    assert routing.tokens.tolist() == [slot // len(index[0]) for slot in order]
    assert routing.experts.tolist() == sorted(flat)
    assert int(routing.bad_indices()) == flat.count(num_experts)


def test_a_thousand_equal_choices_keep_their_order():
    routing = route(torch.zeros(1000, 1, dtype=torch.int32), 3)
    assert routing.order.tolist() == list(range(1000))


@pytest.mark.parametrize("shape", [(0, 2), (5, 0), (0, 0)])
def test_no_rows_give_empty_tensors_and_zero_counts(shape):
    routing = route(torch.empty(shape, dtype=torch.int64), 4)
    assert routing.order.shape == routing.inverse.shape == (0,)
    assert routing.counts.tolist() == [0, 0, 0, 0]
    assert routing.offsets.tolist() == [0, 0, 0, 0, 0]


def test_strides_and_integer_width_do_not_matter():
    index = torch.tensor([[3, 1], [0, 3], [2, 2]])
    want = route(index, 4)
    for same in (index.to(torch.int32), index.T.contiguous().T, torch.stack([index, index], dim=-1)[..., 0]):
        assert torch.equal(route(same, 4).order, want.order)


def test_shapes_and_dtypes_do_not_depend_on_the_indices():
    """On the meta device there are no indices to look at, so this also proves that nothing is read back."""
    routing = route(torch.empty(6, 2, dtype=torch.int64, device="meta"), 5)
    assert (routing.order.shape, routing.inverse.shape) == ((12,), (12,))
    assert (routing.counts.shape, routing.offsets.shape) == ((5,), (6,))
    assert routing.counts.dtype == routing.offsets.dtype == torch.int64
    assert routing.order.dtype == routing.inverse.dtype == torch.int32
    assert routing.tokens.shape == routing.experts.shape == (12,)


def test_a_routing_is_frozen():
    with pytest.raises(AttributeError):
        setattr(route(torch.zeros(1, 1, dtype=torch.int64), 1), "num_experts", 2)  # noqa: B010


@pytest.mark.parametrize(
    ("index", "num_experts", "error", "message"),
    [
        (torch.zeros(2, 1), 4, TypeError, "top_k_index is torch.float32; pass int32 or int64"),
        (torch.zeros(2, dtype=torch.int64), 4, ValueError, r"top_k_index has shape \(2,\); pass \[T, k\]"),
        (torch.zeros(2, 1, dtype=torch.int64), 0, ValueError, "num_experts is 0; pass at least 1"),
    ],
)
def test_route_refuses_what_is_no_routing(index, num_experts, error, message):
    with pytest.raises(error, match=message):
        dormouse_kernels.route(index, num_experts)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUTINGS = {
    "few": (torch.tensor([[2, 0], [2, 1], [0, 2]]), 3),
    "none": (torch.zeros(0, 2, dtype=torch.int64), 4),
    "one expert": (torch.zeros(90, 1, dtype=torch.int64), 1),
    "sentinels": (torch.tensor([[-1, 2], [5, 9], [2**40, 0]]), 5),
    "only sentinels": (torch.full((40, 2), -1), 2),
    "several blocks": (torch.randint(-2, 9, (700, 2), generator=torch.Generator().manual_seed(1)), 7),
    "int32": (torch.tensor([[4, 0], [1, 4]], dtype=torch.int32), 5),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_triton_sorts_and_cuts_as_torch_does(name):
    index, num_experts = ROUTINGS[name]
    index = index.to(DEVICE)
    got = route(index, num_experts, tile_rows=16, implementation="triton")
    want = route(index, num_experts, implementation="reference")
    for field in ("counts", "offsets", "order", "inverse"):
        assert torch.equal(getattr(got, field), getattr(want, field)), field
    assert got.tile_map is got.cut(16)
    assert_same_tiles(got.tile_map, want.cut(16))
    assert_same_tiles(cut_tiles(got.offsets, index.numel(), 32), cut(want.counts, want.offsets, index.numel(), 32))


def assert_same_tiles(got, want):
    assert got.max_tiles == want.max_tiles
    for field in ("start", "tiles", "long"):
        assert torch.equal(getattr(got, field), getattr(want, field)), field


def test_tiles_cover_every_row_once_and_every_expert_has_one():
    routing = route(torch.tensor([[0, 3], [0, 0], [0, 9], [0, 0]]), 5)
    cut = routing.cut(2)
    tiles = cut.tiles.view(-1, 4).tolist()
    assert tiles[:8] == [[0, 0, 2, 3], [0, 2, 4, 3], [0, 4, 6, 3], [1, 6, 6, 1], [2, 6, 6, 1], [3, 6, 7, 1],
                         [4, 7, 7, 1], [5, 7, 8, 1]]  # fmt: skip
    assert all(words == [-1, 0, 0, 0] for words in tiles[8:])
    assert cut.start.tolist() == [0, 3, 4, 5, 6, 7, 8]
    assert cut.long.tolist() == [1, 0, 1, 2, 3, 4]


def test_sixty_five_thousand_experts_are_routed():
    index = torch.randint(0, 65_536, (50, 2), generator=torch.Generator().manual_seed(0))
    routing = route(index, 65_536)
    assert torch.equal(index.view(-1)[routing.order.long()], index.view(-1).sort(stable=True).values)
    with pytest.raises(ValueError, match="num_experts is 65536 and implementation='triton' takes up to 4094"):
        route(index, 65_536, implementation="triton")


def test_an_implementation_that_cannot_run_is_refused_by_name():
    with pytest.raises(ValueError, match="implementation is 'fast'; pass one of auto, reference, triton"):
        route(torch.zeros(1, 1, dtype=torch.int64), 1, implementation="fast")


def test_another_number_of_tokens_compiles_no_other_kernel(monkeypatch):
    """Constants are alike for every T, and the numbers that T changes are not specialised on their divisibility."""
    seen = {}

    def keep(kernel, grid, arguments, **options):
        parameters = inspect.signature(kernel.fn).parameters
        fixed = {n: v for n, v in arguments.items() if "constexpr" in str(parameters[n].annotation)}
        free = {n: v for n, v in arguments.items() if n not in fixed and isinstance(v, int)}
        seen.setdefault(kernel.fn.__name__, []).append((fixed, free))

    monkeypatch.setattr(sort, "launch", keep)
    for tokens in (1, 3, 16, 1000, 16384):
        index = torch.empty(tokens, 2, dtype=torch.int64, device="meta")
        sort.sort_slots(index, 8, 64)
        sort.cut_tiles(torch.empty(9, dtype=torch.int64, device="meta"), 2 * tokens, 128)
    assert len(seen) == 5
    for name, calls in seen.items():
        assert all(fixed == calls[0][0] for fixed, _ in calls), name
        assert {n for _, free in calls for n in free if free[n] != calls[0][1][n]} <= set(kernels.OF_T), name
