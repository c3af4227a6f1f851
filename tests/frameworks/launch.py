"""Runs a script of a framework on several CPU ranks, as a user would: by torchrun."""

import os
import subprocess
import sys
from pathlib import Path

#: Seconds that a script may take: importing the framework on a busy machine is the most of it.
LIMIT = 900


def launch(script: Path, *arguments: object, ranks: int = 1) -> str:
    """What the script printed; its error, if it failed."""
    command = [sys.executable, "-W", "ignore"]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
    }
    done = subprocess.run(
        [*command, str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, f"{script.name} {arguments}:\n{done.stdout}\n{done.stderr}"
    return done.stdout
