"""What the figures were taken on, and how quiet it was."""

import importlib.metadata
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

import dcp_rs

_PACKAGES = ("torch", "safetensors", "numpy")


def describe(folder: Path) -> dict[str, Any]:
    """The machine, the file system below `folder`, and the versions."""
    cpu = _field("/proc/cpuinfo", "model name") or platform.machine()
    memory = int((_field("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) * 1024
    thp = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpu": cpu,
        "processor": _processor(cpu),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 1e9, 1),
        "file_system": file_system(folder),
        "kernel": platform.release(),
        "transparent_hugepages": re.findall(r"\[(\w+)\]", thp.read_text())[0]
        if thp.exists()
        else "",
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "dcp_rs": dcp_rs.__version__,
        "commit": _commit(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
    }


def label(machine: dict[str, Any]) -> str:
    """A name for files: the processor, short, and its cores."""
    cpu = re.sub(r"\(.*?\)|\b(CPU|Processor|Core)\b|@.*", " ", machine["cpu"])
    return re.sub(r"[^a-z0-9]+", "-", cpu.lower()).strip("-") + f"-{machine['cores']}cores"


def noise(seconds: float = 1.0) -> dict[str, float]:
    """What others use of the processors while this process sleeps, stolen time included, and the load average."""
    before = _processor_times()
    time.sleep(seconds)
    spent = [after - was for after, was in zip(_processor_times(), before, strict=True)]
    idle = spent[3] + spent[4]
    return {
        "busy": round(1 - idle / max(1, sum(spent[:8])), 3),
        "stolen": round(spent[7] / max(1, sum(spent[:8])), 3),
        "load_average": os.getloadavg()[0],
    }


def file_system(folder: Path) -> str:
    """Type and device of the mount that holds a folder."""
    best = ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        device, mount, kind, *_ = line.split()
        if folder.resolve().is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, f"{kind} on {device}")
    return best[1]


def _processor_times() -> list[int]:
    return [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]


def _field(path: str, name: str) -> str | None:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _caches() -> str:
    """The sizes of the caches of a core, from the first level on."""
    folder = Path("/sys/devices/system/cpu/cpu0/cache")
    return ", ".join(
        f"L{(index / 'level').read_text().strip()} {(index / 'size').read_text().strip()}"
        for index in sorted(folder.glob("index*"))
        if (index / "type").read_text().strip() != "Instruction"
    )


def _processor(cpu: str) -> str:
    """The processor for people: name, family and model, caches."""
    family, model = (_field("/proc/cpuinfo", name) for name in ("cpu family", "model"))
    which = f"family {family}, model {model}; " if family else ""
    return f"{cpu} ({which}{_caches()})".replace("(R)", "")


def _commit() -> str:
    here = Path(__file__).parent
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout.strip() or "unknown"
