"""What is to be published: `python .ci/dist.py dist` looks into wheels and sdist, `python .ci/dist.py --release [TAG]` whether the numbers agree."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: As old as torch's own wheels ask for.
POLICIES = {
    "manylinux_2_28_x86_64",
    "manylinux_2_28_aarch64",
    "musllinux_1_2_x86_64",
    "musllinux_1_2_aarch64",
}


def version() -> str:
    """The release that the source tree is of."""
    found: str = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    return found


def wheel_faults(path: Path) -> list[str]:
    """What is wrong with a wheel."""
    about = f"dcp_rs-{version()}.dist-info"
    sbom = f"{about}/sboms/dcp-rs-py.cyclonedx.json"
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        components = json.loads(archive.read(sbom))["components"] if sbom in names else []
    faults = [
        f"no {needed}"
        for needed in (
            "dcp_rs/py.typed",
            "dcp_rs/_core.pyi",
            f"{about}/entry_points.txt",
            f"{about}/licenses/LICENSE",
            sbom,
        )
        if needed not in names
    ]
    extensions = [name for name in names if name.endswith((".so", ".pyd", ".dylib"))]
    if extensions != ["dcp_rs/_core.abi3.so"]:
        faults.append(f"extensions: {extensions}")
    faults += [
        f"{name} does not belong there" for name in names if not name.startswith(("dcp_rs/", about))
    ]
    faults += licence_faults(components)
    tag = path.stem.split("-")[-1]
    if "linux" in tag:
        faults += linux_faults(path, tag)
    return faults


def licence_faults(components: list[dict[str, Any]]) -> list[str]:
    """What the SBOM names with a licence that deny.toml does not allow."""
    allowed = tomllib.loads((ROOT / "deny.toml").read_text())["licenses"]["allow"]
    print(f"  SBOM: {len(components)} components")
    faults = [] if components else ["the SBOM names no component"]
    for component in components:
        for licence in component.get("licenses", [{"expression": "none"}]):
            expression = (
                licence.get("expression")
                or licence["license"].get("id")
                or licence["license"]["name"]
            )
            if not allows(expression, allowed):
                faults.append(f"{component['name']}: {expression} is not allowed")
    return faults


def allows(expression: str, allowed: list[str]) -> bool:
    """Whether an expression of SPDX can be met by these licences."""
    words = re.findall(r"\(|\)|[^()\s]+(?: WITH [^()\s]+)?", expression.replace("/", " OR "))
    known = {"AND": "and", "OR": "or", "(": "(", ")": ")"}
    made = " ".join(known.get(word) or str(word in allowed) for word in words)
    return bool(eval(made))  # True, False, and, or, parentheses


def linux_faults(path: Path, tag: str) -> list[str]:
    """Whether the libraries that it asks for are as old as its tag says."""
    faults = [] if tag in POLICIES else [f"{tag}: one of {sorted(POLICIES)}"]
    if tag.startswith("musl"):  # auditwheel looks for the machine's own musl, which is not there
        return faults + musl_faults(path)
    shown = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", str(path)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    consistent = re.findall(r'following\s+platform\s+tags?:\s+"([^"]+)"', " ".join(shown.split()))
    print(f"  auditwheel: {', '.join(consistent)}")
    if not any(older(found, tag) for found in consistent):
        faults.append(f"auditwheel finds it to be {consistent}, not {tag}")
    return faults


def musl_faults(path: Path) -> list[str]:
    """Whether nothing but musl is asked for: it has no versions of symbols."""
    from elftools.elf.dynamic import DynamicSection
    from elftools.elf.elffile import ELFFile

    with zipfile.ZipFile(path) as archive:
        elf = ELFFile(io.BytesIO(archive.read("dcp_rs/_core.abi3.so")))
    needed = [
        tag.needed
        for section in elf.iter_sections()
        if isinstance(section, DynamicSection)
        for tag in section.iter_tags("DT_NEEDED")
    ]
    print(f"  needs: {', '.join(needed)}")
    faults = [
        f"it needs {library}"
        for library in needed
        if not re.fullmatch(r"libc(\.musl-\w+)?\.so(\.1)?", library)
    ]
    return faults + (
        ["it has versions of symbols"] if elf.get_section_by_name(".gnu.version_r") else []
    )


def older(found: str, tag: str) -> bool:
    """Whether what was found is for systems at least as old as those of the tag."""
    shape = re.compile(r"(many|musl)linux_(\d+)_(\d+)_(\w+)")
    one, other = shape.fullmatch(found), shape.fullmatch(tag)
    if one is None or other is None or (one[1], one[4]) != (other[1], other[4]):
        return False
    return (int(one[2]), int(one[3])) <= (int(other[2]), int(other[3]))


def sdist_faults(path: Path) -> list[str]:
    """What is wrong with an sdist: all that tests and documentation read is to be there, and nothing that was built."""
    top = f"dcp_rs-{version()}"
    with tarfile.open(path) as archive:
        names = {name.removeprefix(f"{top}/") for name in archive.getnames()}
    tracked = subprocess.run(
        ["git", "ls-files"], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout.split("\n")
    wanted = {
        name
        for name in tracked
        if name.startswith(
            (
                "python/",
                "rust/core/",
                "rust/remote/",
                "rust/py/",
                "tests/",
                "benches/",
                "docs/",
                "examples/",
            )
        )
        or name in ("Makefile", "LICENSE", "README.md", "mkdocs.yml", "CITATION.cff")
    }
    faults = [f"no {name}" for name in sorted(wanted - names)[:10]]
    return faults + [
        f"{name} does not belong there" for name in sorted(names) if name.endswith((".so", ".pyc"))
    ]


def release_faults(tag: str | None) -> list[str]:
    """Whether version, tag, citation, changelog and the first pages are of one release."""
    number = version()
    faults = [] if tag in (None, f"v{number}") else [f"the tag is {tag}, the version {number}"]
    if not re.search(
        rf"^version: {re.escape(number)}$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE
    ):
        faults.append(f"CITATION.cff is not of {number}")
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    named = [heading for heading in headings if number in heading]
    if not named:
        faults.append(f"CHANGELOG.md has no section of {number}")
    elif tag is not None and "Unreleased" in named[0]:
        faults.append(f"CHANGELOG.md calls {number} unreleased")
    for page in ("README.md", "docs/index.md", "docs/install.md"):
        text = (ROOT / page).read_text()
        said = re.findall(r"(\d+\.\d+)(?:,| is) not released yet", text)
        if tag is not None and (said or "Until the first release" in text):
            faults.append(f"{page} calls {number} unreleased")
        elif any(not number.startswith(f"{one}.") for one in said):
            faults.append(f"{page} is of {said}, not of {number}")
    return faults


def main() -> int:
    if sys.argv[1] == "--release":
        faults = {"the release": release_faults(sys.argv[2] if len(sys.argv) > 2 else None)}
    else:
        files = sorted(Path(sys.argv[1]).iterdir())
        if not files:
            sys.exit(f"{sys.argv[1]} is empty")
        faults = {}
        for path in files:
            print(path.name)
            faults[path.name] = wheel_faults(path) if path.suffix == ".whl" else sdist_faults(path)
    for what, found in faults.items():
        for fault in found:
            print(f"{what}: {fault}", file=sys.stderr)
    return 1 if any(faults.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
