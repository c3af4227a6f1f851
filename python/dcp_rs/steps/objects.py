"""Objects in the folder of a step on a store."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from dcp_rs import _core
from dcp_rs.checkpoint.locate import INDEX_NAME, is_data_file
from dcp_rs.steps import notes

__all__ = ["Object", "Objects", "is_own", "walk"]

#: Seconds. Nothing tells on a store who is at work: what was stored since may be of a save that goes on, as for ``clean``.
_DAY = 24 * 60 * 60


@dataclass(frozen=True)
class Object:
    """An object, as a store lists it: its bytes, the seconds since it was stored, and its tag, if it has one."""

    nbytes: int
    age: float
    tag: str | None

    @property
    def is_young(self) -> bool:
        """Whether it may be of a save that goes on."""
        return self.age < _DAY


@dataclass(frozen=True)
class Objects:
    """What lies in a folder: objects by name, and the names of the folders in it."""

    files: dict[str, Object] = field(default_factory=dict)
    folders: tuple[str, ...] = ()

    @classmethod
    def of(cls, files: Collection[tuple[str, int, float, str | None]], folders: Collection[str]) -> Objects:
        """From what the engine lists."""
        return cls({name: Object(nbytes, age, tag) for name, nbytes, age, tag in files}, tuple(folders))

    @property
    def key(self) -> frozenset[object]:
        """The same for two listings between which nothing was stored or removed."""
        return frozenset((name, file.nbytes, file.tag) for name, file in self.files.items()) | frozenset(self.folders)

    @property
    def unsettled(self) -> set[str]:
        """The ids of the saves that are noted to be under way, and not to be committed."""
        ids = {name: notes.id_of(name) for name in self.files}
        saved = {save_id for name, save_id in ids.items() if name.startswith("saved-")}
        return {save_id for name, save_id in ids.items() if save_id and name.startswith("saving-")} - saved

    def of_others(self, own: Collection[str], save_id: str) -> set[str]:
        """What other saves than the committed one, of which the data files are ``own``, have here: data, and notes."""
        return {
            name
            for name in self.files
            if (is_data_file(name) and name not in own) or notes.id_of(name) not in (None, save_id)
        }


def is_own(name: str) -> bool:
    """Whether an object in the folder of a step is of a save of this package."""
    return name == INDEX_NAME or is_data_file(name) or notes.is_note(name)


def walk(store: _core.Store, folder: Path) -> Objects:
    """All that lies below a folder, by its name from there."""
    found: dict[str, Object] = {}
    below = [""]
    while below:
        listed = store.list([folder / prefix for prefix in below])
        deeper = []
        for prefix, (files, folders) in zip(below, listed, strict=True):
            found |= {prefix + name: file for name, file in Objects.of(files, ()).files.items()}
            deeper += [f"{prefix}{name}/" for name in folders]
        below = deeper
    return Objects(found)
