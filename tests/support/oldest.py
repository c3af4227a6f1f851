"""Prints the oldest version of a dependency that pyproject.toml allows, as 2.8.0 for torch>=2.8."""

import re
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def oldest(package: str) -> str:
    for requirement in tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]:
        match = re.fullmatch(rf"{re.escape(package)}\s*>=\s*([\d.]+)", requirement)
        if match:
            version = match[1]
            return version + ".0" * (2 - version.count("."))
    sys.exit(f"pyproject.toml gives no lower bound for {package}")


if __name__ == "__main__":
    sys.stdout.write(oldest(sys.argv[1]) + "\n")
