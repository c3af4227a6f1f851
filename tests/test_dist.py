"""What looks into wheels before they are published sees what is wrong with one."""

import importlib.util
import json
import zipfile

import pytest

from support.places import ROOT

spec = importlib.util.spec_from_file_location("dist", ROOT / ".ci" / "dist.py")
dist = importlib.util.module_from_spec(spec)
spec.loader.exec_module(dist)

ABOUT = f"dcp_rs-{dist.version()}.dist-info"
SBOM = {"components": [{"name": "libc", "licenses": [{"expression": "MIT OR Apache-2.0"}]}]}
WHOLE = {
    "dcp_rs/_core.abi3.so": "",
    "dcp_rs/_core.pyi": "",
    "dcp_rs/py.typed": "",
    f"{ABOUT}/entry_points.txt": "",
    f"{ABOUT}/licenses/LICENSE": "",
    f"{ABOUT}/sboms/dcp-rs-py.cyclonedx.json": json.dumps(SBOM),
}


def faults(folder, content):
    path = folder / f"dcp_rs-{dist.version()}-cp311-abi3-macosx_11_0_arm64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in content.items():
            archive.writestr(name, text)
    return dist.wheel_faults(path)


def test_a_wheel_that_is_right(tmp_path):
    assert faults(tmp_path, WHOLE) == []


@pytest.mark.parametrize("missing", WHOLE)
def test_a_wheel_that_lacks_something(tmp_path, missing):
    content = {name: text for name, text in WHOLE.items() if name != missing}
    assert faults(tmp_path, content)


def test_a_wheel_with_something_else(tmp_path):
    assert faults(tmp_path, WHOLE | {"tests/test_dist.py": ""}) == [
        "tests/test_dist.py does not belong there"
    ]


def test_a_licence_that_is_not_allowed(tmp_path):
    sbom = {"components": [{"name": "odd", "licenses": [{"expression": "MIT AND GPL-3.0-only"}]}]}
    content = WHOLE | {f"{ABOUT}/sboms/dcp-rs-py.cyclonedx.json": json.dumps(sbom)}
    assert faults(tmp_path, content) == ["odd: MIT AND GPL-3.0-only is not allowed"]


@pytest.mark.parametrize(
    ("expression", "holds"),
    [
        ("MIT", True),
        ("MIT/Apache-2.0", True),
        ("GPL-3.0-only OR MIT", True),
        ("(MIT OR GPL-3.0-only) AND Zlib", True),
        ("(MIT OR Apache-2.0) AND GPL-3.0-only", False),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("none", False),
    ],
)
def test_licences(expression, holds):
    assert (
        dist.allows(expression, ["MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "Zlib"])
        is holds
    )


@pytest.mark.parametrize(
    ("found", "tag", "holds"),
    [
        ("manylinux_2_28_x86_64", "manylinux_2_28_x86_64", True),
        ("manylinux_2_17_x86_64", "manylinux_2_28_x86_64", True),
        ("manylinux_2_34_x86_64", "manylinux_2_28_x86_64", False),
        ("musllinux_1_2_x86_64", "manylinux_2_28_x86_64", False),
        ("manylinux_2_28_aarch64", "manylinux_2_28_x86_64", False),
        ("linux_x86_64", "manylinux_2_28_x86_64", False),
    ],
)
def test_tags(found, tag, holds):
    assert dist.older(found, tag) is holds


def test_version_citation_and_changelog_agree():
    assert dist.release_faults(None) == []
    assert dist.release_faults("v0.0.1")


def test_the_first_pages_are_of_the_release(tmp_path, monkeypatch):
    """The home page said that 0.1 is not released yet when the version was 0.2."""
    for name in ("Cargo.toml", "CITATION.cff", "CHANGELOG.md", "README.md", "docs/install.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "docs" / "index.md").write_text("Version 0.1 is not released yet.")
    monkeypatch.setattr(dist, "ROOT", tmp_path)
    (fault,) = dist.release_faults(None)
    assert fault.startswith("docs/index.md is of ['0.1'], not of ")
    assert f"docs/index.md calls {dist.version()} unreleased" in dist.release_faults(
        f"v{dist.version()}"
    )
