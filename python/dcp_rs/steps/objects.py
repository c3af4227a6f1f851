"""What lies in the folder of a step on a store, and what is noted there of its removal."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dcp_rs import _core
from dcp_rs.checkpoint.locate import INDEX_NAME, is_data_file
from dcp_rs.steps import notes

__all__ = ["Object", "Objects", "Removal", "is_own", "is_removal", "walk"]

#: Seconds. Nothing tells on a store who is at work: what was stored since may be of a save that goes on, as for ``clean``.
_DAY = 24 * 60 * 60

_REMOVAL = re.compile(r"removing-[0-9a-f]{32}\.json")


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
    def removals(self) -> list[str]:
        """The names of what is noted of removals."""
        return [name for name in self.files if is_removal(name)]

    @property
    def unsettled(self) -> set[str]:
        """The ids of the saves that are noted to be under way, and not to be committed."""
        ids = {name: notes.id_of(name) for name in self.files}
        saved = {save_id for name, save_id in ids.items() if name.startswith("saved-")}
        return {save_id for name, save_id in ids.items() if save_id and name.startswith("saving-")} - saved

    @property
    def settled(self) -> bool:
        """Whether a save is noted to be committed."""
        return any(name.startswith("saved-") for name in self.files)

    def of_others(self, own: Collection[str], save_id: str) -> set[str]:
        """What other saves than the committed one, of which the data files are ``own``, have here: data, and notes."""
        return {
            name
            for name in self.files
            if (is_data_file(name) and name not in own) or notes.id_of(name) not in (None, save_id)
        }


def is_removal(name: str) -> bool:
    """Whether an object has the name of what is noted of a removal."""
    return _REMOVAL.fullmatch(name) is not None


def is_own(name: str) -> bool:
    """Whether an object in the folder of a step is of a save of this package, or of a removal."""
    return name == INDEX_NAME or is_data_file(name) or notes.is_note(name) or is_removal(name)


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


@dataclass(frozen=True)
class Removal:
    """What is noted before a step is removed: of which save it is, and what will be removed besides the index, whose removal makes it no step."""

    save_id: str
    files: frozenset[str]

    def to_bytes(self) -> bytes:
        """As it is stored."""
        return json.dumps({"save_id": self.save_id, "files": sorted(self.files)}).encode()

    @classmethod
    def of(cls, data: bytes | None) -> Removal | None:
        """From what was stored; None where that cannot be read."""
        try:
            noted: Mapping[str, object] = json.loads(data or b"")
            save_id, files = noted["save_id"], noted["files"]
        except (ValueError, TypeError, KeyError):
            return None
        if not isinstance(save_id, str) or not isinstance(files, list):
            return None
        return cls(save_id, frozenset(map(str, files)) - {INDEX_NAME})

    @staticmethod
    def name_of(save_id: str) -> str:
        """A name for it: the same each time that a step is tried to be removed."""
        return f"removing-{save_id or uuid.uuid4().hex}.json"
