"""The root of a run, in a folder or on a store: what it holds, whoever put it there."""

import os
import time
from pathlib import Path

import torch

import dcp_rs
from dcp_rs import CheckpointManager
from dcp_rs.steps.object_store import step_store_at

DAY = 24 * 60 * 60


def save_step(store, number, metrics=None, *, settle=True, save_id=None):
    """Save a step as a manager does; without ``settle``, as one that is killed after its commit."""
    save_id = save_id or f"{number:032x}"
    store.begin(number, save_id, metrics or {})
    state = {"w": torch.full((1000,), float(number)), "v": torch.full((10,), float(number))}
    dcp_rs.save(state, store.folder(number), save_id=save_id, no_dist=True, **store.access)
    if settle:
        store.settle(number, save_id)
    return store.folder(number)


def step_numbers(store):
    return [step.number for step in store.look().steps]


def only_skipped(store):
    """Return the one thing that there is: a step that cannot be loaded."""
    listing = store.look()
    assert listing.steps == []
    assert store.latest() is None
    (skipped,) = listing.passed_over
    return skipped


class Root:
    """A root. Keys are relative to it: ``step-10/index.dcprs``.

    Attributes:
        url: the path or URL of the root.
        options: its ``storage_options``.
        young: the kind of step that a killed save leaves, before a day is over.
        busy: the kind of step that a save is writing.
        clock: seconds by which the times of files may be off.
    """

    url: str
    options: dict | None
    young: str
    busy: str
    clock: float

    def store(self):
        """Return the steps, seen by somebody who knows nothing from before."""
        return step_store_at(self.url, self.options)

    def manager(self, **options):
        return CheckpointManager(self.url, storage_options=self.options, **options)

    def data_of(self, step):
        """Return the key of the data file of a step."""
        return next(k for k in self.keys(f"step-{step}/g") if k.endswith(".safetensors"))

    def cut_data(self, step):
        self.write(self.data_of(step), self.read(self.data_of(step))[:100])

    def remove_data(self, step):
        self.remove(self.data_of(step))

    def remove_index(self, step):
        self.remove(f"step-{step}/index.dcprs")

    def flip(self, key, at=-1):
        data = bytearray(self.read(key))
        data[at] ^= 0xFF
        self.write(key, bytes(data))

    def flip_data(self, step):
        self.flip(self.data_of(step))

    def flip_index(self, step):
        self.flip(f"step-{step}/index.dcprs", 200)


class FolderRoot(Root):
    options, young, busy, clock = None, "unfinished", "in use", 0

    def __init__(self, path: Path):
        self.path, self.url = path, str(path)

    def names(self):
        """Return what is in the root, but for the note of whose run it is, and the lock."""
        return sorted(p.name for p in self.path.iterdir() if not p.name.startswith(".dcprs"))

    def keys(self, prefix=""):
        files = (p.relative_to(self.path).as_posix() for p in self.path.rglob("*") if p.is_file())
        return sorted(key for key in files if key.startswith(prefix))

    def read(self, key):
        return (self.path / key).read_bytes()

    def write(self, key, data):
        (self.path / key).parent.mkdir(parents=True, exist_ok=True)
        (self.path / key).write_bytes(data)

    def remove(self, key):
        (self.path / key).unlink()

    def modified(self, key):
        return (self.path / key).stat().st_mtime

    def age(self):
        """Let two days go by. Locks tell what a save does, but for one that wrote no data yet."""
        for note in self.path.glob("*/saving-*"):
            os.utime(note, (time.time() - 2 * DAY,) * 2)

    def open_uploads(self):
        return []

    def add_what_is_no_step(self):
        (self.path / "latest").symlink_to("step-3")
        (self.path / "logs").mkdir()


class StoreRoot(Root):
    young, busy, clock = "unknown", "unknown", 60

    def __init__(self, server):
        self.server, self.url = server, server.url("run")
        self.options = server.options(max_retries=2)
        self.open_uploads = server.open_uploads

    def names(self):
        return sorted({n for k in self.keys() if not (n := k.split("/")[0]).startswith(".dcprs")})

    def keys(self, prefix=""):
        return [key.removeprefix("run/") for key in self.server.keys(f"run/{prefix}")]

    def read(self, key):
        return self.server.objects[f"run/{key}"].data

    def write(self, key, data):
        self.server.put(f"run/{key}", data)

    def remove(self, key):
        del self.server.objects[f"run/{key}"]

    def modified(self, key):
        return self.server.objects[f"run/{key}"].modified

    def age(self):
        for key in self.server.keys("run/"):
            self.server.objects[key].modified = time.time() - 2 * DAY

    def add_what_is_no_step(self):
        self.write("step-20/", b"")  # what consoles make of a folder
        self.write("logs/events", b"x")
