"""What the built wheels say of themselves: bounded ranges on their siblings, and names that cannot collide."""

from __future__ import annotations

import subprocess
import zipfile
from email.parser import Parser
from itertools import combinations
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, zipfile.ZipFile]:
    """Every package's wheel, built from its sdist, by distribution name."""
    dist = tmp_path_factory.mktemp("dist")
    command = ["uv", "build", "--quiet", "--all-packages", "--out-dir", str(dist)]
    subprocess.run(command, cwd=ROOT, check=True)
    return {path.name.split("-")[0].replace("_", "-"): zipfile.ZipFile(path) for path in dist.glob("*.whl")}


def metadata(wheel: zipfile.ZipFile):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_a_wheel_bounds_its_siblings_and_admits_their_present_versions(wheels):
    assert set(wheels) == {f"dormouse-{name}" for name in ("kernels", "quant", "model", "train", "bench")}
    seen = 0
    for package, wheel in wheels.items():
        for line in map(Requirement, metadata(wheel).get_all("Requires-Dist", [])):
            if line.name in wheels:
                seen += 1
                version = metadata(wheels[line.name])["Version"]
                assert {spec.operator for spec in line.specifier} == {">=", "<"}, f"{package} asks for {line}"
                assert line.specifier.contains(version), f"{package} asks for {line}, built beside {version}"
    assert seen >= len(wheels) - 1


def test_no_two_wheels_write_the_same_path(wheels):
    paths = {package: set(wheel.namelist()) for package, wheel in wheels.items()}
    for one, other in combinations(paths, 2):
        assert not paths[one] & paths[other], f"{one} and {other} share files"


def test_a_wheel_holds_one_import_name_its_own(wheels):
    for package, wheel in wheels.items():
        tops = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" not in name}
        assert tops == {package.replace("-", "_")}, package


def test_a_wheel_carries_its_licence(wheels):
    for package, wheel in wheels.items():
        if package != "dormouse-bench":  # an app, never published
            assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist()), package
