"""What every test here runs under: poisoned memory, and Triton's interpreter where there is no GPU."""

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType

import pytest
import torch
from dormouse_kernels.proof import archs, proof

__all__ = ["proof"]

if not torch.cuda.is_available():
    # before anything imports triton: its own library is decorated then
    os.environ.setdefault("TRITON_INTERPRET", "1")
# cuBLAS refuses deterministic mode without it
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an `arch` runs for every card that is compiled for."""
    if "arch" in metafunc.fixturenames:
        metafunc.parametrize("arch", archs(metafunc.config))


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """`torch.empty` and its kin hold NaN, so that an element which nobody wrote shows up."""
    # use_deterministic_algorithms(True), but for that function's import of the whole of inductor
    torch.set_deterministic_debug_mode("error")
    assert torch.empty(3).isnan().all()
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.fixture(scope="session")
def planted() -> ModuleType:
    """The kernels of `planted.py`, which pytest's importlib mode puts on no path."""
    spec = importlib.util.spec_from_file_location("planted", Path(__file__).with_name("planted.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class LatentCase:
    """Arguments of `latent_glu_experts`, all random, and a random upstream gradient."""

    hidden_states: torch.Tensor
    gate_up_proj: torch.Tensor
    scale: torch.Tensor
    v: torch.Tensor
    top_k_index: torch.Tensor
    top_k_weights: torch.Tensor
    residual: torch.Tensor
    grad: torch.Tensor

    def leaves(self) -> dict[str, torch.Tensor]:
        """What has a gradient, by name."""
        names = ("hidden_states", "gate_up_proj", "scale", "v", "top_k_weights", "residual")
        return {name: getattr(self, name) for name in names}

    def to(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> "LatentCase":
        """The same values in a float dtype on a device, as new leaves."""
        moved = {}
        for each in fields(self):
            tensor = getattr(self, each.name).detach()
            kept = tensor.dtype if each.name == "top_k_index" else dtype
            moved[each.name] = tensor.to(device, kept, copy=True)
            if each.name in self.leaves():
                moved[each.name].requires_grad_()
        return LatentCase(**moved)


@pytest.fixture
def latent_case():
    """Makes a `LatentCase`; `top_k_index` can be given."""

    def make(
        T: int = 11,
        d: int = 48,
        r: int = 16,
        f: int = 37,
        E: int = 5,
        k: int = 2,
        *,
        dtype: torch.dtype = torch.float64,
        top_k_index: torch.Tensor | None = None,
        seed: int = 0,
    ) -> LatentCase:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int, by: float = 1.0) -> torch.Tensor:
            return (by * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()

        if top_k_index is None:
            top_k_index = torch.rand(T, E, generator=generator).argsort(dim=1)[:, :k]
        k = top_k_index.shape[1]
        width = -(-f // 16) * 16
        return LatentCase(
            hidden_states=draw(T, d),
            gate_up_proj=draw(E, 2 * r, d, by=d**-0.5),
            scale=draw(E, 2 * r),
            v=draw(E, f, r, by=r**-0.5),
            top_k_index=top_k_index,
            top_k_weights=draw(T, k),
            residual=draw(T, width),
            grad=draw(T, width).detach(),
        )

    return make
