"""The steps of a run on a store, where nothing can be renamed or locked: the index of a step is there, or is not, and that is all that counts."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dcp_rs import _core
from dcp_rs._url import StorageOptions, Url, location, options_for
from dcp_rs.checkpoint.locate import INDEX_NAME, STOCK_NAME, is_data_file
from dcp_rs.errors import (
    CorruptDataError,
    CorruptIndexError,
    StoragePreconditionError,
    UnsupportedError,
)
from dcp_rs.steps import notes
from dcp_rs.steps.folder_root import FolderRoot
from dcp_rs.steps.notes import saved_name, saving_name, verified_name
from dcp_rs.steps.root import Listing, Root, SkippedStep, Step, StepNames, Why

__all__ = ["Object", "Objects", "StoreRoot", "root_at", "walk"]

#: Seconds. Nothing tells on a store who is at work: what was stored since may be of a save that
#: goes on, as for ``clean``.
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
    def of(
        cls, files: Collection[tuple[str, int, float, str | None]], folders: Collection[str]
    ) -> Objects:
        """From what the engine lists."""
        return cls(
            {name: Object(nbytes, age, tag) for name, nbytes, age, tag in files}, tuple(folders)
        )

    @property
    def key(self) -> frozenset[object]:
        """The same for two listings between which nothing was stored or removed."""
        return frozenset(
            (name, file.nbytes, file.tag) for name, file in self.files.items()
        ) | frozenset(self.folders)

    @property
    def unsettled(self) -> set[str]:
        """The ids of the saves that are noted to be under way, and not to be committed."""
        ids = {name: notes.id_of(name) for name in self.files}
        saved = {save_id for name, save_id in ids.items() if name.startswith("saved-")}
        return {
            save_id for name, save_id in ids.items() if save_id and name.startswith("saving-")
        } - saved

    def of_others(self, own: Collection[str], save_id: str) -> set[str]:
        """What other saves than the committed one, of which the data files are ``own``, have here: data, and notes."""
        return {
            name
            for name in self.files
            if (is_data_file(name) and name not in own) or notes.id_of(name) not in (None, save_id)
        }


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


#: Steps that are looked at together: so many indexes are in memory.
_AT_ONCE = 16
#: How often a step is looked at that seems damaged, and changes between two looks.
_LOOKS = 5


class StoreRoot(Root):
    """The prefix of a run on a store.

    A step is listed before its index is read: an index names what was stored before it. One listing
    tells of all data files whether they are there, and have their lengths. What is the same in two
    listings is the same, and is not read again.

    Args:
        path: its URL.
        options: how to reach the store.
        names: of the prefixes of steps.
    """

    def __init__(
        self, path: Url, options: StorageOptions | None, names: StepNames | None = None
    ) -> None:
        super().__init__(names)
        self.path = path
        self.access: Mapping[str, Any] = {"storage_options": options}
        self._known: dict[int, tuple[object, Step]] = {}
        self._listed: dict[int, Objects] = {}  # when a step was last looked at

    def _store(self) -> _core.Store:
        """The store, for one look: what is seen in it has to stay the same."""
        # What is secret gets no name here: tools show the variables of a traceback.
        return _core.Store(
            os.fspath(self.path), options_for(self.path, self.access["storage_options"]) or {}
        )

    # --- looking
    # ---------------------------------------------------------------------------------------

    def is_run(self) -> bool:
        """Whether it has steps, and is no checkpoint itself."""
        try:
            store = self._store()
            if store.has_index(os.fspath(self.path), None):
                return False
            ((files, folders),) = store.list([self.path])
        except UnsupportedError:  # a server of files, which lists nothing
            return False
        return STOCK_NAME not in Objects.of(files, ()).files and any(
            self._step_names.number(name) is not None for name in folders
        )

    def _names(self) -> list[str]:
        ((_, folders),) = self._store().list([self.path])
        return sorted(folders)

    def _holds_index(self, path: Path) -> bool:
        return self._store().has_index(os.fspath(path), None)

    def _look_at(self, numbers: Sequence[int]) -> list[Step | SkippedStep | None]:
        found: list[Step | SkippedStep | None] = []
        for begin in range(0, len(numbers), _AT_ONCE):
            found += self._look_at_some(numbers[begin : begin + _AT_ONCE])
        return found

    def _look_at_some(self, numbers: Sequence[int]) -> list[Step | SkippedStep | None]:
        found: dict[int, Step | SkippedStep | None] = {}
        waiting = {number: Objects() for number in numbers}
        for look in range(_LOOKS):
            store = self._store()
            listed = store.list([self.folder(number) for number in waiting])
            now = {number: Objects.of(*each) for number, each in zip(waiting, listed, strict=True)}
            # What is damaged, and was so when it looked the same, is.
            before = waiting if found else {}
            waiting = {
                number: each
                for number, each in now.items()
                if number not in before or each.key != before[number].key
            }
            try:
                found |= self._judge(store, waiting) if waiting else {}
            except (
                CorruptDataError,
                StoragePreconditionError,
            ):  # something went, or was replaced, as it was read
                if look == _LOOKS - 1:
                    raise
                waiting = {number: Objects() for number in waiting}
                continue
            waiting = {
                number: objects for number, objects in waiting.items() if _is_damaged(found[number])
            }
            if not waiting:
                break
        return [found[number] for number in numbers]

    def _judge(
        self, store: _core.Store, listed: Mapping[int, Objects]
    ) -> dict[int, Step | SkippedStep | None]:
        self._listed |= listed
        found: dict[int, Step | SkippedStep | None] = {}
        unread = []
        for number, objects in listed.items():
            known = self._known.get(number)
            if INDEX_NAME not in objects.files:
                found[number] = self._without_index(store, number, objects)
            elif known is not None and known[0] == objects.key:
                found[number] = known[1]
            else:
                unread.append(number)
        indexes = _read(store, [self.folder(number) / INDEX_NAME for number in unread])
        for number, data in zip(unread, indexes, strict=True):
            found[number] = self._with_index(store, number, listed[number], data)
        noted = {
            number: name for number in unread if (name := _note_of(found[number], listed[number]))
        }
        read = _read_notes(
            store, [(self.folder(number), name, listed[number]) for number, name in noted.items()]
        )
        told = {
            number: {} if data is None else notes.of(self.folder(number) / noted[number], data)
            for number, data in zip(noted, read, strict=True)
        }
        for number in unread:
            step = found[number]
            if isinstance(step, Step):
                step = found[number] = replace(step, **told.get(number, {}))
                self._known[number] = listed[number].key, step
        return found

    def _with_index(
        self, store: _core.Store, number: int, objects: Objects, data: bytes | None
    ) -> Step | SkippedStep:
        """A step, but for what is noted of it."""
        path = self.folder(number)

        def damaged(why: str) -> SkippedStep:
            return SkippedStep(number=number, path=path, why=why, kind="damaged")

        if data is None:
            return damaged(f"its {INDEX_NAME} went while it was looked at")
        try:
            index = _core.Index.from_bytes(data, os.fspath(path / INDEX_NAME), False)
        except CorruptIndexError as error:
            return damaged(str(error))
        except UnsupportedError as error:  # of a later version
            return SkippedStep(number=number, path=path, why=str(error), kind="foreign")
        files = index.files()
        there = walk(store, path) if any("/" in file.name for file in files) else objects
        for file in files:
            found = there.files.get(file.name)
            if file.external:
                return damaged(f"its index names data outside of its folder, as {file.name}")
            if found is None:
                return damaged(f"its data file {file.name} is gone")
            if found.nbytes != file.size:
                return damaged(
                    f"its data file {file.name} has {found.nbytes:,} bytes, and should have {file.size:,}"
                )
        save_id = (index.save_id or "").replace("-", "")
        return Step(
            number=number,
            path=path,
            save_id=save_id,
            saved=time.time() - objects.files[INDEX_NAME].age,
            nbytes=len(data) + sum(file.size for file in files),
            reused=sum(used for used, linked in index.use_of_files() if linked),
            files={os.fspath(path / file.name): file.size for file in files},
            verified=verified_name(save_id) in objects.files,
        )

    def _without_index(
        self, store: _core.Store, number: int, objects: Objects
    ) -> SkippedStep | None:
        """Return the state of a prefix without an index. Nothing tells a killed save or removal from one that goes on but age."""
        if not objects.files and not objects.folders:
            return None
        strange = {name for name in (*objects.files, *objects.folders) if not notes.is_own(name)}
        if strange:
            noted = [
                (self.folder(number), name, objects)
                for name in objects.files
                if notes.is_note(name)
            ]
            strange.difference_update(*map(notes.files_of, _read_notes(store, noted)))
        kind: Why
        if strange:
            kind, why = (
                "foreign",
                f"it has no {INDEX_NAME}, and holds {min(strange)}: dcp_rs.index(path) may adopt it",
            )
        elif any(found.is_young for found in objects.files.values()):
            kind, why = "unknown", "its save did not finish, or goes on: a store does not tell"
        else:
            kind, why = "unfinished", "its save did not finish"
        return SkippedStep(number=number, path=self.folder(number), why=why, kind=kind)

    # --- whose run it is
    # ---------------------------------------------------------------------------------

    def _alone(self) -> AbstractContextManager[object]:
        return nullcontext()  # a store has no locks

    def _read_run(self) -> bytes | None:
        (data,) = self._store().read([self.path / notes.RUN_NAME])
        return data

    def _write_run(self, data: bytes) -> None:
        self._store().put(self.path / notes.RUN_NAME, data)

    # --- a save
    # ----------------------------------------------------------------------------------------

    def begin(
        self,
        number: int,
        save_id: str,
        metrics: Mapping[str, float],
        files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """Note what is being saved, and put ``files`` beside it."""
        store, path = self._store(), self.folder(number)
        note = notes.of_save(number, metrics, self.run, files)
        for name, data in {saving_name(save_id): note, **files}.items():
            store.put(path / name, data)

    def settle(self, number: int, save_id: str) -> None:
        """Notes that a save is committed, and forgets what was noted of others that it replaced."""
        store, path = self._store(), self.folder(number)
        (noted,) = store.read([path / saving_name(save_id)])
        if noted is not None:
            store.put(path / saved_name(save_id), noted)
        ((files, _),) = store.list([path])
        objects = Objects.of(files, ())
        # Of another save that may go on it stays: it is what tells of it.
        going_on = {
            saving_name(other)
            for other in objects.unsettled
            if objects.files[saving_name(other)].is_young
        }
        replaced = {
            name for name in objects.files if notes.id_of(name) not in (None, save_id)
        } - going_on
        store.remove(
            [path / name for name in sorted({*replaced, saving_name(save_id)} & set(objects.files))]
        )

    def _note_verified(self, step: Step) -> None:
        self._store().put(step.path / verified_name(step.save_id), b"{}")

    # --- removal
    # ---------------------------------------------------------------------------------------

    def remove(self, number: int) -> None:
        """Remove a step: its index, with which it ends, then the rest.

        What a kill leaves of it is no step, and is for :meth:`sweep`, a day later. What a save that
        goes on there may have stored stays.

        Raises:
            RunTakenOverError: another run began here.
            StoragePreconditionError: the step is another one than it was a moment ago.
            StorageError: the first object that could not be removed; the others were tried.
        """
        store, path = self._store(), self.folder(number)
        objects = walk(store, path)
        doomed = set(objects.files)
        if INDEX_NAME not in doomed:
            if store.has_index(os.fspath(path), None):
                raise _saved_anew(number, path)
            # What is young may be of a save that goes on there now.
            _delete(store, path, {name for name in doomed if not objects.files[name].is_young})
            return
        (data,) = store.read([path / INDEX_NAME])
        with suppress(
            CorruptIndexError, UnsupportedError
        ):  # it names nothing: all that is there goes
            index = _core.Index.from_bytes(data or b"", os.fspath(path / INDEX_NAME), False)
            save_id = (index.save_id or "").replace("-", "")
            others = objects.of_others({file.name for file in index.files()}, save_id)
            doomed -= {name for name in others if objects.files[name].is_young}
        self._known.pop(number, None)
        try:
            with self.holding():
                store.remove_seen(path / INDEX_NAME)
        except StoragePreconditionError:
            # Whether the one before was removed or replaced is not known. What is left of it goes
            # in a day.
            raise _saved_anew(number, path) from None
        _delete(store, path, doomed - {INDEX_NAME})

    def sweep(self) -> Listing:
        """Remove what killed saves and removals left a day ago and earlier, beside a step that is whole too."""
        self._listed = {}
        found = self.look()
        for step in found.steps:
            self._tidy(step, self._listed[step.number])
        for left in found.left:
            self.remove(left.number)
        self._listed = {}
        return found

    def _tidy(self, step: Step, objects: Objects) -> None:
        """Removes what other saves left beside a step, a day ago and earlier."""
        own = {name for name in objects.files if os.fspath(step.path / name) in step.files}
        left = {
            name
            for name in objects.of_others(own, step.save_id)
            if not objects.files[name].is_young
        }
        if saved_name(step.save_id) in objects.files:  # a kill came before this was removed
            left |= {saving_name(step.save_id)} & set(objects.files)
        if left:
            _delete(self._store(), step.path, left)


def _saved_anew(number: int, path: Path) -> StoragePreconditionError:
    msg = f"step {number} was saved anew while it was to be removed; it was not touched"
    return StoragePreconditionError(msg, path=path, operation="remove", attempts=1)


def _is_damaged(found: Step | SkippedStep | None) -> bool:
    return isinstance(found, SkippedStep) and found.kind == "damaged"


def _note_of(found: Step | SkippedStep | None, objects: Objects) -> str | None:
    """The name of what is noted of a step."""
    if not isinstance(found, Step):
        return None
    names = (saved_name(found.save_id), saving_name(found.save_id))
    return next((name for name in names if name in objects.files), None)


def _read(store: _core.Store, paths: list[Path]) -> list[bytes | None]:
    return store.read(paths) if paths else []


def _read_notes(store: _core.Store, noted: list[tuple[Path, str, Objects]]) -> list[bytes | None]:
    """Return the bytes of notes, each by its folder, its name and what is listed there; none of what is too long for one."""
    is_short = [objects.files[name].nbytes <= notes.MOST for _, name, objects in noted]
    read = iter(
        _read(
            store,
            [
                folder / name
                for (folder, name, _), short in zip(noted, is_short, strict=True)
                if short
            ],
        )
    )
    return [next(read) if short else b"" for short in is_short]


def _delete(store: _core.Store, folder: Path, names: set[str] | frozenset[str]) -> None:
    """Data first: what is noted of it tells for longest what it was."""
    noted = {name for name in names if notes.is_note(name)}
    for some in (names - noted, noted):
        if some:
            store.remove([folder / name for name in sorted(some)])


def root_at(
    path: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | Any | None = None,
    names: StepNames | None = None,
) -> Root:
    """The root at a path, or at a URL. Nothing is looked at yet.

    Raises:
        UnsupportedError: a scheme that is not known, or options for a path of the file system.
    """
    where = location(path)
    # What is secret gets no name here: tools show the variables of a traceback.
    if isinstance(where, Url):
        return StoreRoot(where, StorageOptions.of(storage_options), names)
    options_for(where, StorageOptions.of(storage_options))
    return FolderRoot(where, names)
