"""Every `@triton.jit` function under a source tree, found by reading and not by importing, and which rows prove it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from dormouse_kernels.proof.rows import CompilerRow, ParityRow

Table = Literal["parity", "sm120"]
NEEDED_LEVELS = ("interpreter", "gpu")
NEEDED_ARCHS = (120, 90)


def jit_functions(src_root: Path) -> list[str]:
    """`module.name` of every function under `src_root` that `triton.jit` decorates or is called on, sorted.

    Found under any import name, beside other decorators, nested in functions and classes. Errors: `ValueError` for a
    folder without Python files, so that a mistyped path cannot pass for a tree without kernels.
    """
    files = sorted(src_root.rglob("*.py"))
    if not files:
        raise ValueError(f"jit_functions: there is no Python file under {src_root}; pass a source tree")
    found: set[str] = set()
    for file in files:
        module = ".".join(file.relative_to(src_root).with_suffix("").parts).removesuffix(".__init__")
        found.update(f"{module}.{name}" for name in _in_source(file.read_text(encoding="utf-8")))
    return sorted(found)


def _in_source(source: str) -> Iterable[str]:
    tree = ast.parse(source)
    modules, names = _imported(tree)

    def is_jit(node: ast.expr) -> bool:
        if isinstance(node, ast.Call):
            return is_jit(node.func)
        if isinstance(node, ast.Attribute):
            return node.attr == "jit" and ast.unparse(node.value) in modules
        return isinstance(node, ast.Name) and node.id in names

    def walk(node: ast.AST, prefix: str) -> Iterable[str]:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                if any(is_jit(decorator) for decorator in child.decorator_list):
                    yield prefix + child.name
                inner = f"{prefix}{child.name}."
            elif isinstance(child, ast.Call) and is_jit(child.func):
                yield from (prefix + argument.id for argument in child.args if isinstance(argument, ast.Name))
            yield from walk(child, inner)

    return walk(tree, "")


def _imported(tree: ast.AST) -> tuple[set[str], set[str]]:
    """What stands for the module `triton` in this source, and what stands for `triton.jit`."""
    modules: set[str] = set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules.update(alias.asname or alias.name for alias in node.names if alias.name == "triton")
            dotted = any(alias.name.startswith("triton.") and not alias.asname for alias in node.names)
            modules.update(["triton"] if dotted else [])
            modules.update(alias.asname or alias.name for alias in node.names if alias.name == "triton.runtime.jit")
        elif isinstance(node, ast.ImportFrom) and node.module in ("triton", "triton.runtime", "triton.runtime.jit"):
            names.update(alias.asname or alias.name for alias in node.names if alias.name == "jit")
    return modules, names


def missing(functions: Sequence[str], table: Table, rows: Sequence[ParityRow] | Sequence[CompilerRow]) -> list[str]:
    """One sentence for every function that a table lacks a row for; empty when all are proven.

    `parity` wants a row in the interpreter and one on a GPU (which may read `not run`), `sm120` one for sm_120 and
    one for sm_90.
    """
    proven: set[tuple[str, str]] = set()
    for row in rows:
        where = row.level if isinstance(row, ParityRow) else f"sm_{row.compiled.arch}"
        proven.update((kernel, where) for kernel in row.kernels)
    needed = NEEDED_LEVELS if table == "parity" else tuple(f"sm_{arch}" for arch in NEEDED_ARCHS)
    return [
        f"{function} has no row for {where} in the {table} table; add a test that proves it"
        for function in functions
        for where in needed
        if (function, where) not in proven
    ]
