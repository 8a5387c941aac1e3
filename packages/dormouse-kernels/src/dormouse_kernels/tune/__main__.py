"""`python -m dormouse_kernels.tune OP`: times the tiles around the table's row on this card and writes the best.

Without a GPU, `--compile-only --arch 120` compiles them for a card and ranks them by spills, occupancy and shared
memory: a choice of what to measure, marked as such.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from dormouse_kernels import tiles as files
from dormouse_kernels.aot import SHARED_LIMITS
from dormouse_kernels.moe.grouped import tiles as grouped
from dormouse_kernels.moe.latent import tiles as latent
from dormouse_kernels.moe.passes import Tiles
from dormouse_kernels.tune.candidates import Candidate, compile_all, time_all
from dormouse_kernels.tune.grid import grid
from dormouse_kernels.tune.problem import Problem, builds, call

SIZES = {
    "latent_glu_experts": {"T": 16384, "d": 2048, "r": 64, "f": 5461, "experts": 1024, "k": 2},
    "glu_experts": {"T": 16384, "d": 2048, "r": 768, "f": 2048, "experts": 128, "k": 8},
}
"""Of b1's expert pass, and of Qwen3-30B-A3B's experts."""
COLUMNS = ("tiles", "shared", "registers", "spills", "occupancy", "ms", "")


def table_row(problem: Problem, arch: int) -> Tiles:
    """What a call without tiles gets on that card."""
    capability, itemsize = divmod(arch, 10), problem.dtype.itemsize
    if problem.latent:
        return latent.tiles_for(capability, itemsize, problem.r)
    return grouped.tiles_for(capability, itemsize, problem.T * problem.k / problem.experts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line; exits with 2 and one sentence where it cannot be met."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    present = torch.cuda.is_available()
    if not present and not asked.compile_only:
        parser.error("there is no CUDA device to measure on; pass --compile-only --arch 120")
    if asked.arch is None:
        if not present:
            parser.error("--compile-only without a CUDA device needs to know the card; pass --arch, such as 120")
        major, minor = torch.cuda.get_device_capability()
        asked.arch = 10 * major + minor
    if asked.arch not in SHARED_LIMITS:
        parser.error(f"--arch is {asked.arch}; pass one of {', '.join(map(str, SHARED_LIMITS))}")
    sizes = {name: getattr(asked, name) or size for name, size in SIZES[asked.op].items()}
    problem = Problem(asked.op, **sizes, dtype=getattr(torch, asked.dtype))
    candidates = grid(table_row(problem, asked.arch), asked.only)
    print(f"{problem}: {len(candidates)} candidates for sm_{asked.arch}", flush=True)
    made = compile_all(candidates, lambda tiles: builds(problem, tiles, asked.arch))
    if not asked.compile_only:
        from triton.testing import do_bench

        run = call(problem, torch.device("cuda"))
        made = time_all(made, run, lambda work: do_bench(work, return_mode="median"))
    _report(made, problem, asked.arch, asked.json, measured=not asked.compile_only)


def _report(made: list[Candidate], problem: Problem, arch: int, path: Path | None, *, measured: bool) -> None:
    ranked = sorted(made, key=lambda candidate: candidate.rank)
    print("shared memory, registers, spills and occupancy are those of the launches that a change touches")
    for line in _table(ranked, made[0]):
        print(line)
    best = ranked[0]
    if best.failure:
        print("tune: every candidate failed; the table's row stays", file=sys.stderr)
        raise SystemExit(1)
    if measured:
        origin = f"{best.ms:.4f} ms forward and backward on {torch.cuda.get_device_name()}"
    else:
        origin = f"compiled for sm_{arch}, not measured"
    print(f"best: {best.name} ({origin})")
    if path is not None:
        files.write(path, problem.op, best.tiles, origin=f"{problem}; {best.name}; {origin}; torch {torch.__version__}")
        print(f"written to {path}: dormouse_kernels.tiles.read({str(path)!r}, {problem.op!r}) gives what tiles= takes")


def _table(ranked: list[Candidate], row: Candidate) -> list[str]:
    rows = [COLUMNS]
    for each in ranked:
        changed = replace(each, kernels=tuple(kernel for kernel in each.kernels if kernel not in row.kernels))
        shown = changed if changed.kernels else each
        compiled = (str(shown.shared), str(shown.registers), str(shown.spills), f"{shown.occupancy:.2f}")
        ms = "-" if each.ms is None else f"{each.ms:.4f}"
        said = each.failure and f"failed: {each.failure}"
        rows.append((each.name, *(compiled if each.kernels else ("-",) * 4), ms, said))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dormouse_kernels.tune", description=__doc__)
    parser.add_argument("op", choices=SIZES)
    parser.add_argument("--compile-only", action="store_true", help="rank by what the compiler says; needs no GPU")
    parser.add_argument("--arch", type=int, metavar="ARCH", help="compute capability × 10 (default: this card's)")
    parser.add_argument("--only", default="", metavar="SIZE", help="only changes that begin so, as in grad_v")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the best tiles here")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    for name, meaning in (
        ("T", "tokens"), ("d", "model width"), ("r", "rank, or inner width"), ("f", "ffn width of latent experts"),
        ("experts", "experts"), ("k", "experts a token"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{meaning} (default: b1's, or Qwen3's)")
    return parser


if __name__ == "__main__":
    main()
