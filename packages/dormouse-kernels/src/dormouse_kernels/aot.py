"""Compiles any `@triton.jit` kernel for a card that is not here, and reads what it would cost off the cubin.

The arguments are specialised by Triton's own launcher code (pointers and integers divisible by 16, integers equal to
one): without that the compiler vectorises nothing and shared memory reads three times too small. Triton ships every
tool that is needed. With `TRITON_INTERPRET` set a decorated kernel cannot be compiled, so the work is then done in a
subprocess without it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

SHARED_LIMITS: dict[int, int] = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory that a block may have, by compute capability × 10 (CUDA C programming guide)."""

_ACCESS = re.compile(r"\b(LDGSTS|LDG|STG)((?:\.\w+)*)")
_MMA = re.compile(r"\b((?:HMMA|HGMMA|QMMA|QGMMA|OMMA|IMMA|IGMMA)(?:\.\w+)+)")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


@dataclass(frozen=True)
class Pointer:
    """Stands for a tensor argument: its dtype, and whether its address is divisible by 16 (a fresh tensor's is)."""

    dtype: torch.dtype
    aligned: bool = True

    def data_ptr(self) -> int:
        """An address of that alignment, for the launcher to specialise on."""
        return 256 if self.aligned else 257


@dataclass(frozen=True)
class Build:
    """One compilation: a kernel, the arguments of a launch by name (`Pointer`s for tensors), and a target."""

    kernel: Any
    """A function decorated with `@triton.jit`."""
    arguments: Mapping[str, Any]
    arch: int
    """Compute capability × 10: 120 for a GeForce RTX 50, 90 for an H200."""
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True)
class Compiled:
    """What a kernel costs on one architecture, read off its cubin."""

    kernel: str
    arch: int
    shared: int
    """Bytes of shared memory a block."""
    registers: int
    """A thread's."""
    spills: int
    """Bytes of stack a thread; 0 unless registers spilled."""
    loads: Mapping[int, int] = field(default_factory=dict)
    """Global load instructions by bytes a thread, copies into shared memory apart."""
    stores: Mapping[int, int] = field(default_factory=dict)
    """Global store instructions by bytes a thread."""
    async_copies: Mapping[int, int] = field(default_factory=dict)
    """Asynchronous global-to-shared copies by bytes a thread."""
    mma: tuple[str, ...] = ()
    """Every kind of matrix instruction, as SASS names it: HMMA (mma.sync), HGMMA (wgmma), … ."""
    ttir: str = field(default="", repr=False)
    ptx: str = field(default="", repr=False)

    @property
    def narrow_accesses(self) -> int:
        """Global accesses of at most two bytes: what an odd width or a lost alignment costs."""
        widths = (self.loads, self.stores, self.async_copies)
        return sum(n for counts in widths for width, n in counts.items() if width <= 2)


class CompileError(RuntimeError):
    """A kernel that does not compile for its target; the message holds the kernel, the target and Triton's words."""


def shared_limit(arch: int) -> int:
    """Bytes of shared memory that a block may have on `arch`. Errors: `ValueError` for one not in the table."""
    if arch not in SHARED_LIMITS:
        raise ValueError(f"shared_limit: arch is {arch}; pass one of {', '.join(map(str, SHARED_LIMITS))}")
    return SHARED_LIMITS[arch]


def compile_kernels(builds: Sequence[Build]) -> list[Compiled]:
    """Compiles each build, in order; needs no GPU.

    In this process, or, where `TRITON_INTERPRET` made the kernels interpreted ones, in a subprocess a core: there
    a kernel is found again by its file and name, so it must be defined at the top level of a file.
    Errors: `CompileError` for the first that does not compile; `TypeError` for something that is no Triton kernel.
    """
    for build in builds:
        if not hasattr(build.kernel, "fn"):
            raise TypeError(f"compile_kernels: {build.kernel!r} is no Triton kernel; decorate it with @triton.jit")
    if not any(_is_interpreted(build.kernel) for build in builds):
        return [_compile(build) for build in builds]
    made = []
    for result in compile_each(builds):
        if isinstance(result, CompileError):
            raise result
        made.append(result)
    return made


def compile_kernel(
    kernel: Any, arguments: Mapping[str, Any], *, arch: int, num_warps: int = 4, num_stages: int = 3
) -> Compiled:
    """`compile_kernels` for one."""
    return compile_kernels([Build(kernel, arguments, arch, num_warps, num_stages)])[0]


def _is_interpreted(kernel: Any) -> bool:
    return type(kernel).__name__ == "InterpretedFunction"


def _compile(build: Build) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel = build.kernel
    target = GPUTarget("cuda", build.arch, 32)
    backend = make_backend(target)
    # what JITFunction.run does before it compiles, with this target in place of the current device's
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    launch = {**build.arguments, "num_warps": build.num_warps, "num_stages": build.num_stages, "debug": False}
    bound, specialization, options = bind(**launch)
    options, signature, constexprs, attributes = kernel._pack_args(backend, launch, bound, specialization, options)
    source = ASTSource(kernel, signature, constexprs, attributes)
    try:
        binary = triton.compile(source, target=target, options=options.__dict__)
    except Exception as error:  # Triton raises many kinds, its C++ passes RuntimeError
        reason = f"{type(error).__name__}: {error}"
        raise CompileError(f"{_name(kernel)} does not compile for sm_{build.arch}: {reason}") from error
    return _read(_name(kernel), build.arch, binary)


def _name(kernel: Any) -> str:
    return f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"


def _read(name: str, arch: int, binary: Any) -> Compiled:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(binary.asm["cubin"])
        usage = _cuobjdump("--dump-resource-usage", cubin)
        sass = _cuobjdump("--dump-sass", cubin)
    found = _USAGE.search(usage)
    if found is None:
        raise CompileError(f"{name}: cuobjdump printed no resource usage for sm_{arch}: {usage!r}")
    accesses: dict[str, Counter[int]] = {"LDG": Counter(), "STG": Counter(), "LDGSTS": Counter()}
    for opcode, suffixes in _ACCESS.findall(sass):
        accesses[opcode][_width(suffixes.split("."))] += 1
    return Compiled(
        kernel=name,
        arch=arch,
        shared=binary.metadata.shared,
        registers=int(found[1]),
        spills=int(found[2]),
        loads=dict(accesses["LDG"]),
        stores=dict(accesses["STG"]),
        async_copies=dict(accesses["LDGSTS"]),
        mma=tuple(sorted(set(_MMA.findall(sass)))),
        ttir=binary.asm["ttir"],
        ptx=binary.asm["ptx"],
    )


def _width(suffixes: Sequence[str]) -> int:
    """Bytes a thread of a SASS access: .128 and .64 are bits, .U8 and .S16 too, no width is a 32-bit word."""
    for suffix in suffixes:
        if suffix in ("128", "64"):
            return int(suffix) // 8
        if suffix in ("U8", "S8", "U16", "S16"):
            return int(suffix[1:]) // 8
    return 4


def _cuobjdump(option: str, cubin: Path) -> str:
    from triton import knobs

    tool = knobs.nvidia.cuobjdump.path
    return subprocess.run([tool, option, str(cubin)], check=True, capture_output=True, text=True).stdout


def compile_each(builds: Sequence[Build]) -> list[Compiled | CompileError]:
    """Compiles every build, in order, in processes beside this one: a failure is its entry, and the rest goes on.

    A process a core, since most of the work is one thread's. A compiler that crashes is such a failure too: another
    process goes on after the build that it died of. A kernel is found again by its file and name, so it must be
    defined at the top level of a file.
    """
    if not builds:
        return []
    count = min(os.cpu_count() or 1, len(builds))
    results: list[Compiled | CompileError] = [CompileError("not compiled")] * len(builds)
    with ThreadPoolExecutor(count) as pool:
        for part, made in enumerate(pool.map(_compile_share, [builds[part::count] for part in range(count)])):
            results[part::count] = made
    return results


def _compile_share(builds: Sequence[Build]) -> list[Compiled | CompileError]:
    """The builds of one core, one after the other."""
    requests = [
        (inspect.getsourcefile(b.kernel.fn), b.kernel.fn.__module__, b.kernel.fn.__qualname__, dict(b.arguments),
         b.arch, b.num_warps, b.num_stages)
        for b in builds
    ]  # fmt: skip
    results: list[Compiled | CompileError] = []
    while len(results) < len(requests):
        made, said = _in_subprocess(requests[len(results) :])
        results += made
        if len(results) < len(requests):
            results.append(CompileError(f"the compiling process left with {said}"))
    return results


def _in_subprocess(requests: Sequence[tuple[Any, ...]]) -> tuple[list[Compiled | CompileError], str]:
    """The results until the process ended, and how it did."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "asked", Path(folder) / "answered"
        asked.write_bytes(pickle.dumps(requests))
        answered.touch()
        command = [sys.executable, "-m", "dormouse_kernels.aot", str(asked), str(answered)]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        results: list[Compiled | CompileError] = []
        # the last answer of a process that died may be half written
        with answered.open("rb") as file, contextlib.suppress(EOFError, pickle.UnpicklingError):
            while True:
                results.append(pickle.load(file))
    return results, f"{ran.returncode}: {ran.stderr[-2000:]}"


def _answer(asked: Path, answered: Path) -> None:
    """The subprocess: builds what `asked` names, one after another, and writes down each result as it is made."""
    modules: dict[str, ModuleType] = {}
    with answered.open("wb") as file:
        for source, module, name, arguments, arch, num_warps, num_stages in pickle.loads(asked.read_bytes()):
            if source not in modules:
                modules[source] = _load(source, module)
            result: Compiled | CompileError
            try:
                result = _compile(Build(getattr(modules[source], name), arguments, arch, num_warps, num_stages))
            except CompileError as error:
                result = CompileError(str(error))
            pickle.dump(result, file)
            file.flush()


def _load(file: str, name: str) -> ModuleType:
    """The module of that name if it is importable from that file, otherwise the file by itself."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is not None and found.origin == file:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise CompileError(f"{file} is no Python file; define the kernel at the top level of one")
    module = importlib.util.module_from_spec(spec)
    # dataclasses and Triton look a function's module up by name
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    # run as __main__ this file's classes would pickle under that name
    from dormouse_kernels import aot

    aot._answer(Path(sys.argv[1]), Path(sys.argv[2]))
