"""How much of the package one call enters: modules, functions and depth of a load, and of a save, of four entries.

`python benches/entered.py` prints a line for each. It counts Python functions of `dcp_rs` alone,
and calls of a second load or save, when everything is imported and cached.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import dcp_rs

PACKAGE = str(Path(dcp_rs.__file__).parent)


def entered(call: Callable[[], Any]) -> tuple[int, int, int]:
    """Return the modules and functions of the package that a call enters, and how deep its calls of them nest."""
    seen: set[CodeType] = set()
    depth = deepest = 0

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth, deepest
        code = frame.f_code
        # Comprehensions and generators are parts of the function that they stand in.
        if not code.co_filename.startswith(PACKAGE) or (
            code.co_name.startswith("<") and code.co_name != "<lambda>"
        ):
            return
        if event == "call":
            seen.add(code)
            depth += 1
            deepest = max(deepest, depth)
        elif event == "return":
            depth -= 1

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len({code.co_filename for code in seen}), len(seen), deepest


def main() -> None:
    """Print the figures."""
    state = {
        "a": torch.ones(4),
        "b": torch.ones(2, 3).t(),
        "c": torch.ones(3, dtype=torch.bfloat16),
        "step": 7,
    }
    with tempfile.TemporaryDirectory() as folder:
        calls = {
            "save": lambda: dcp_rs.save(state, folder, no_dist=True, fsync=False),
            "load": lambda: dcp_rs.load(state, folder, no_dist=True),
        }
        for name, call in calls.items():
            call()
            modules, functions, depth = entered(call)
            print(f"{name}: {modules} modules, {functions} functions, {depth} deep")


if __name__ == "__main__":
    main()
