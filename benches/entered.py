"""How much of the package one call enters: modules, functions and depth of a load, and of a save, of four entries.

`python benches/entered.py` prints a line for each, and with `--list` the functions, indented by
their depth, in the order of their first calls. It counts Python functions of `dcp_rs` alone, and
calls of a second load or save, when everything is imported and cached.
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


def entered(call: Callable[[], Any]) -> tuple[dict[CodeType, int], int]:
    """Return the functions that a call enters, with their first depths, and the greatest depth."""
    seen: dict[CodeType, int] = {}
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
            depth += 1
            deepest = max(deepest, depth)
            seen.setdefault(code, depth)
        elif event == "return":
            depth -= 1

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen, deepest


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
            functions, deepest = entered(call)
            modules = {code.co_filename for code in functions}
            print(f"{name}: {len(modules)} modules, {len(functions)} functions, {deepest} deep")
            for code, depth in functions.items() if "--list" in sys.argv else ():
                module = Path(code.co_filename).relative_to(PACKAGE)
                print("  " * depth + f"{code.co_qualname} ({module})")


if __name__ == "__main__":
    main()
