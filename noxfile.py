"""Every check of the workspace, on uv. `uvx nox` runs the default list, `uvx nox -l` names all of it.

`tests` and `wheel` give each package an environment of its own; the other sessions share one that holds every package
and every group. uv links files from its cache, so torch is fetched and unpacked once for any number of environments.
"""

from __future__ import annotations

import datetime
import sys
import tomllib
from pathlib import Path

import nox
from packaging.requirements import Requirement

nox.needs_version = ">=2026.4"
nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).parent
# In the order in which they may depend on one another: kernels <- quant <- model <- train <- bench.
PACKAGES = ("dormouse-kernels", "dormouse-quant", "dormouse-model", "dormouse-train", "dormouse-bench")
PUBLISHED = PACKAGES[:4]
# Tests are small, a second thread mostly waits: parity beside five busy processes took 267 s with two and 55 with one.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SIGNATURES = "signatures.txt"
# Two workers on two cores; a file stays with one of them, so that what its tests share is made once.
WORKERS = ("--numprocesses=logical", "--dist=loadfile")
# The oldest versions that the packages' ranges admit.
# The interpreter of Triton 3.6 makes a number of an array of one element, which numpy refuses from 2.4 on.
FLOOR = ("torch==2.11.*", "triton==3.6.*", "numpy<2.4")


def folder(package: str) -> Path:
    """Where a package lives, relative to the root."""
    return Path("packages", package) if package in PUBLISHED else Path("apps", package.removeprefix("dormouse-"))


def project(package: str) -> dict:
    """The `[project]` table of a package."""
    return tomllib.loads((ROOT / folder(package) / "pyproject.toml").read_text())["project"]


def last_release(package: str) -> str:
    """The version whose public names are kept, in the first line of the package's signature file."""
    return (ROOT / folder(package) / SIGNATURES).read_text().split("\n", 1)[0].rpartition(" ")[2]


def refusing(package: str, version: str) -> list[str]:
    """The siblings whose range on a package would not admit a version of it, each with that range."""
    asked = ((sibling, Requirement(line)) for sibling in PACKAGES for line in project(sibling)["dependencies"])
    return [f"{who} ({line})" for who, line in asked if line.name == package and version not in line.specifier]


def released(changelog: str, version: str, date: str) -> str:
    """The changelog with what stood under `## Unreleased` under the version; refused when nothing stood there."""
    head, mark, rest = changelog.partition("## Unreleased\n")
    if not mark or not rest.partition("\n## ")[0].strip():
        raise ValueError("the changelog has nothing under `## Unreleased`: write what changed, for those who upgrade")
    return f"{head}{mark}\n## {version} ({date})\n{rest}"


def in_workspace(session: nox.Session, *command: str) -> None:
    """Runs a command in the one environment that holds every package and every dependency group."""
    everything = ("--locked", "--all-packages", "--all-groups")
    variables = {"UV_PROJECT_ENVIRONMENT": ".nox/workspace"} | (ONE_THREAD if "pytest" in command else {})
    session.run("uv", "run", *everything, *command, env=variables, external=True)


def prove(session: nox.Session, table: str, *options: str) -> None:
    """Runs every `tests/<table>` folder, prints the rows as one table, and fails for a kernel that has no row in it."""
    folders = [folder(package) / "tests" / table for package in PACKAGES]
    present = [str(path) for path in folders if (ROOT / path).is_dir()]
    sources = [f"--proof-src={folder(package) / 'src'}" for package in PACKAGES]
    plugin = ("-rfE", "-p", "dormouse_kernels.proof", f"--proof-table={table}")
    in_workspace(session, "python", "-m", "pytest", *plugin, *sources, *present, *options)


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """One package's tests in an environment that holds what it and its extras declare: a wrong import fails here."""
    here = {"UV_PROJECT_ENVIRONMENT": session.virtualenv.location}
    sync = ("uv", "sync", "--quiet", "--locked", "--package", package, "--all-extras")
    session.run_install(*sync, env=here, external=True)
    # The two proof folders have sessions of their own.
    proofs = [f"--ignore={folder(package)}/tests/{table}" for table in ("parity", "sm120")]
    session.run("python", "-m", "pytest", *WORKERS, str(folder(package)), *proofs, *session.posargs, env=ONE_THREAD)


@nox.session(venv_backend="none")
def parity(session: nox.Session) -> None:
    """Kernels and layers against their definitions and peers, one table; GPU rows read `not run` without one."""
    prove(session, "parity", *session.posargs)


@nox.session(venv_backend="none")
def sm120(session: nox.Session) -> None:
    """Every shipped kernel compiled for sm_120 and sm_90 with no GPU, one table; `-- all` for the other four cards."""
    others = ["--proof-archs=80,86,89,100"] if "all" in session.posargs else []
    prove(session, "sm120", *others, *(argument for argument in session.posargs if argument != "all"))


@nox.session(reuse_venv=False)
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def wheel(session: nox.Session, package: str) -> None:
    """One package from its built wheel in a clean environment, with the wheels of the siblings that it needs."""
    dist = Path(session.create_tmp()).resolve() / package
    for old in dist.glob("*"):
        old.unlink()
    for sibling in PACKAGES[: PACKAGES.index(package) + 1]:
        session.run_install("uv", "build", "--quiet", "--package", sibling, "--out-dir", str(dist), external=True)
    locked = dist / "locked.txt"
    export = ("uv", "export", "--quiet", "--locked", "--package", package, "--no-emit-workspace", "--no-hashes")
    session.run_install(*export, "--output-file", str(locked), external=True, silent=True)
    wheels = sorted(str(path) for path in dist.glob("*.whl"))
    session.install("--constraints", str(locked), *wheels)
    session.run("uv", "pip", "check", "--python", session.virtualenv.location, external=True)
    session.run("python", "-I", str(ROOT / "docs" / "installed.py"), package, str(ROOT / folder(package)))


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Style, format and types, by ruff and ty."""
    in_workspace(session, "ruff", "check", ".")
    in_workspace(session, "ruff", "format", "--check", ".")
    in_workspace(session, "ty", "check", "packages", "apps", "docs", "noxfile.py")


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """The site built strictly, every Python block run, every shown command covered, the workspace's own claims."""
    in_workspace(session, "zensical", "build", "--strict", "--config-file", "docs/zensical.toml")
    in_workspace(session, "python", "-m", "pytest", *WORKERS, "docs", *session.posargs)


@nox.session(venv_backend="none")
def api(session: nox.Session) -> None:
    """Public names against those of each package's last release: a change needs another version."""
    in_workspace(session, "python", "docs/signatures.py", "check", *PUBLISHED)


@nox.session(default=False)
def floor(session: nox.Session) -> None:
    """CPU tests of every package on the oldest stack that the ranges admit, torch 2.11 and triton 3.6."""
    extras = {package: ",".join(project(package).get("optional-dependencies", {})) for package in PACKAGES}
    editable = (f"{folder(package)}[{extras[package]}]" if extras[package] else folder(package) for package in PACKAGES)
    packages = [argument for path in editable for argument in ("--editable", str(path))]
    groups = [argument for package in PACKAGES for argument in ("--group", f"{folder(package)}/pyproject.toml:test")]
    # Without the root's configuration, whose constraints pin the newer stack.
    session.run_install("uv", "pip", "install", "--no-config", *FLOOR, *packages, *groups, external=True)
    folders = (str(folder(package)) for package in PACKAGES)
    session.run("python", "-m", "pytest", *WORKERS, *folders, *session.posargs, env=ONE_THREAD)


@nox.session(default=False, venv_backend="none")
def bench(session: nox.Session) -> None:
    """The measurements of this machine: `nox -s bench -- experts`."""
    in_workspace(session, "bench", *session.posargs)


@nox.session(default=False, venv_backend="none")
def release(session: nox.Session) -> None:
    """Bump, changelog, signatures, checks, commit, tag of one package: `nox -s release -- dormouse-kernels minor`."""
    if not session.posargs or session.posargs[0] not in PUBLISHED:
        session.error(f"say which package and which part: nox -s release -- {'|'.join(PUBLISHED)} major|minor|patch")
    package, *part = session.posargs
    ahead = project(package)["version"] != last_release(package)
    if len(part) != (0 if ahead else 1):
        mend = "its version is past the last release already: leave the part out" if ahead else "major, minor or patch?"
        session.error(f"{package}: {mend}")
    if session.run("git", "status", "--porcelain", external=True, silent=True):
        session.error("the tree has uncommitted changes: commit them first, a release is a commit of its own")
    own = ("pyproject.toml", "CHANGELOG.md", SIGNATURES)
    changed = (*(str(folder(package) / name) for name in own), "uv.lock")
    try:
        bump = () if ahead else ("--bump", *part)
        command = ("uv", "version", "--package", package, *bump, "--short", "--frozen")
        version = str(session.run(*command, external=True, silent=True)).strip()
        if refusals := refusing(package, version):
            session.error(f"{package} {version} is outside the range of {', '.join(refusals)}: widen it first")
        log = ROOT / folder(package) / "CHANGELOG.md"
        try:
            log.write_text(released(log.read_text(), version, datetime.date.today().isoformat()))
        except ValueError as error:
            session.error(f"{package}: {error}")
        session.run("uv", "lock", external=True)
        in_workspace(session, "python", "docs/signatures.py", "write", package)
        # What depends on it comes after it in the order.
        concerned = PACKAGES[PACKAGES.index(package) :]
        checks = [f"{check}({name})" for check in ("tests", "wheel") for name in concerned]
        session.run(sys.executable, "-m", "nox", "--sessions", "sm120", "docs", *checks, external=True)
    except BaseException:
        session.run("git", "checkout", "--", *changed, external=True)
        raise
    session.run("git", "commit", "--quiet", "--message", f"{package} {version}", "--", *changed, external=True)
    session.run("git", "tag", f"{package}-v{version}", external=True)
