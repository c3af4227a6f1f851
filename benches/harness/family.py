"""Runs one family of cases, or one function of it as `FAMILY.FUNCTION`, in this process: `python -m harness.family NAME CONTEXT OUT`, all JSON."""

import importlib
import json
import logging
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path

from harness import machine
from harness.context import Context


def main(name: str, context_json: str, out: str) -> None:
    warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
    logging.getLogger("torch").setLevel(logging.ERROR)
    context = Context.from_json(context_json)
    before, start = machine.noise(), time.perf_counter()
    family, _, function = name.partition(".")
    rows = getattr(importlib.import_module(f"cases.{family}"), function or "run")(context)
    took = time.perf_counter() - start
    report = {
        "family": name,
        "took_s": round(took, 1),
        "noise": {"before": before, "after": machine.noise()},
        "rows": [asdict(row) | {"verdict": row.verdict} for row in rows],
    }
    Path(out).write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
