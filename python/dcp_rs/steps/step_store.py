"""Stores of steps: the protocol, and what a folder and an object store have in common.

A step is a folder ``step-N`` with a committed index whose data files are all there. No file lists
the steps or points to the latest. A store looks, each time.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from dcp_rs import _core
from dcp_rs.checkpoint.folders import INDEX_NAME, STOCK_NAME, is_foreign
from dcp_rs.checkpoint.locate import MARKS
from dcp_rs.checkpoint.names import some
from dcp_rs.checkpoint.verify import VerifyReport, verify
from dcp_rs.errors import (
    CheckpointNotFoundError,
    CorruptDataError,
    DcpRsError,
    RunTakenOverError,
    StorageError,
    StoragePreconditionError,
    UnsupportedError,
)
from dcp_rs.steps import notes
from dcp_rs.steps.notes import annotated_name, saved_name, saving_name, verified_name

#: Names that other programs give the folders of steps.
_LOOKS_LIKE_A_STEP = re.compile(
    r"(epoch=[0-9]+-)?(step|global_?step|iter|iteration|checkpoint|ckpt|epoch)[-_=]?[0-9]+"
    r"(\.ckpt|\.pth?)?",
    re.IGNORECASE,
)
#: The number of steps whose indexes are in memory together.
_AT_ONCE = 16
#: The number of looks at a step that seems damaged, or whose files go during a look.
_LOOKS = 3
#: Notes of a run have one length, because a network client may remember the length of a file.
_RUN_NOTE_BYTES = 512
#: Seconds. A save may still be under way if it stored something after that.
_DAY = 24 * 60 * 60
#: The most folders in the root that are looked at for other checkpoints.
_OTHERS = 1_000
#: Names of temporary files, of the lock, and of open files that were deleted on NFS or FUSE.
_PASSING = re.compile(
    rf".+\.[0-9a-f]{{16}}\.tmp|{re.escape(_core.LOCK_NAME)}|\.(nfs|fuse_hidden)[0-9a-f]+"
)
#: Ends of names of files that may be a checkpoint of another program.
_MODELS = (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".npz", ".h5", ".gguf")

SkipKind = Literal[
    "unfinished", "in use", "unknown", "no index", "foreign", "unreadable", "damaged"
]
#: A step of these kinds may be whole, so no older step takes its place.
MAY_BE_WHOLE: tuple[SkipKind, ...] = ("no index", "foreign")


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step that is committed and whole.

    Its index opens, and every data file is there and has its length.

    Attributes:
        number: the number of the step.
        path: its folder, or the URL of it.
        save_id: 32 hexadecimal digits that identify the save.
        saved: the time at which the save began, in seconds since 1970.
        nbytes: the bytes of its files.
        reused: the bytes of tensors and values that the save reused from an earlier step.
        linked: the bytes of the files that it shares with the step that it reused.
        files: the bytes of its data files. Steps that share a file have the same key for it.
        metrics: the metrics of the save.
        note: the note of the save, if there is one.
        committed: the time of the commit, by the clock that dates files.
        is_stock: whether torch saved it. Policies never remove it.
        is_superseded: whether all other steps count as newer, whatever their numbers are.
        verified: whether the whole step was read after the save, and matched its digests.
    """

    number: int
    path: Path
    save_id: str
    saved: float
    nbytes: int
    reused: int = 0
    linked: int = 0
    files: Mapping[Any, int] = field(default_factory=dict, repr=False, compare=False)
    metrics: Mapping[str, float] = field(default_factory=dict)
    verified: bool = False
    note: notes.Note | None = field(default=None, repr=False, compare=False)
    committed: float = field(default=0.0, repr=False, compare=False)
    is_stock: bool = field(default=False, repr=False)
    is_superseded: bool = field(default=False, repr=False)

    @property
    def run(self) -> str | None:
        """The id of the run that saved it, if it is known."""
        return None if self.note is None else self.note.run

    @property
    def key(self) -> str:
        """Identify the save in the note of the saves that are older than all others."""
        return f"{self.number} of torch at {self.committed}" if self.is_stock else self.save_id

    @property
    def age(self) -> tuple[bool, int]:
        """A key that sorts steps, the oldest first."""
        return not self.is_superseded, self.number

    @property
    def written(self) -> int:
        """The bytes that the save wrote: all but the shared files."""
        return self.nbytes - self.linked


@dataclass(frozen=True, kw_only=True)
class SkippedStep:
    """A folder with the name of a step that cannot be resumed from.

    Attributes:
        number: the number of the step.
        path: the folder.
        why: the reason, in words.
        kind: ``"unfinished"``: a save was killed, or failed. ``"in use"``: a process is saving it.
            ``"unknown"``: a save was killed or goes on, and nothing tells which. ``"no index"``: it
            is complete, but its index is gone. ``"foreign"``: it holds something that this version
            of this package does not know. ``"unreadable"``: it cannot be read. ``"damaged"``: it
            lacks data, or is not what was saved.
        is_over: an earlier run, or this one, began the save, and cannot commit it any more.
        is_left: it is unfinished, and a save wrote all that it holds.
    """

    number: int
    path: Path
    why: str
    kind: SkipKind
    is_over: bool = field(default=False, repr=False, compare=False)
    is_left: bool = field(default=False, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.path.name}: {self.why}"


@dataclass(frozen=True)
class Listing:
    """Steps under a root, in order.

    Attributes:
        steps: the whole steps.
        passed_over: the other steps.
        names: the names in the root.
    """

    steps: list[Step]
    passed_over: list[SkippedStep]
    names: Sequence[str] = field(default=(), repr=False, compare=False)

    @property
    def left(self) -> list[SkippedStep]:
        """The leftovers of killed saves before the latest step. A later save may just begin."""
        latest = self.steps[-1].number if self.steps else -1
        return [step for step in self.passed_over if step.is_left and step.number < latest]


@dataclass(frozen=True)
class File:
    """A file in the folder of a step, or a folder in it.

    Attributes:
        nbytes: the length.
        id: identifies the file. Hard links to one file have the same id.
        version: changes when the content changes.
        changed: the time of the last change, in seconds since 1970.
        is_file: false for a folder, a pipe or a link that leads nowhere.
    """

    nbytes: int
    id: Hashable
    version: Hashable
    changed: float = field(compare=False)
    is_file: bool = True


def _by_age(steps: Iterable[Step], superseded: Collection[str]) -> list[Step]:
    marked = [replace(step, is_superseded=step.key in superseded) for step in steps]
    return sorted(marked, key=lambda step: step.age)


class RunNote(Protocol):
    """The note that says which run may save and remove steps. The root is locked while it exists.

    A network client may remember what a name led to. It does not remember a lock, so what is read
    through the locked descriptor is what the last holder wrote.
    """

    def read(self) -> bytes:
        """Return its bytes, or none."""

    def write(self, data: bytes, fsync: bool, /) -> None:
        """Replace it."""


#: The content of a folder, by name. Two listings are equal if nothing changed between them.
Files = Mapping[str, File]


def is_old(file: File) -> bool:
    """Return whether a save that is under way cannot have stored this file: it is a day old."""
    return time.time() - file.changed > _DAY


def _is_note(name: str, file: File) -> bool:
    """Return whether a file may be a note."""
    return notes.id_of(name) is not None and file.is_file and file.nbytes <= notes.MAX_BYTES


class StepStore(ABC):
    """The steps of one run, and the operations on them.

    A subclass lists, reads, stores and removes files. A removal differs between file systems and
    object stores, and so does the way to tell whether a save is under way.

    Args:
        step_name: the name of the folder of a step, with ``{}`` for its number.
        fsync: sync notes, and removals, where that is not the store's matter.

    Attributes:
        path: a folder, which need not exist yet, or a URL.
        access: the arguments with which a save or a load reaches a step.
        run: the id of this process's run, after it took over the root.
        since: the time of that, by the clock that dates files.
        problems: what a removal or a sweep could not delete yet, and why.

    Raises:
        ValueError: the name is invalid.
    """

    path: Path
    access: Mapping[str, Any]
    run: str | None = None
    since: float = 0.0

    def __init__(self, step_name: str, *, fsync: bool = True) -> None:
        # Hidden names are those of folders under removal.
        pattern = r"([^/{}.\0][^/{}\0]*)?\{(:0?\d{0,2}d)?\}[^/{}\0]*"
        if not (isinstance(step_name, str) and re.fullmatch(pattern, step_name)):
            msg = (
                f"step_name={step_name!r}: pass the name of a folder, with {{}} for the number, or "
                "{:07d} for a number of seven digits"
            )
            raise ValueError(msg)
        self._step_name, self.fsync = step_name, fsync
        self.problems: list[str] = []
        self._saving = ""  # the id of the last save that began here
        # A longer number is part of another thing's name.
        before, after = re.split(r"\{.*\}", step_name)
        self._pattern = re.compile(f"{re.escape(before)}([0-9]{{1,18}}){re.escape(after)}")
        # Whole steps as they were last seen. An equal listing means the same step.
        self._known: dict[int, tuple[Files, Step]] = {}

    def folder(self, number: int) -> Path:
        """Return the folder of a step, which need not exist."""
        return self.path / self._step_name.format(number)

    # --- files

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of the files and folders in the root."""

    @abstractmethod
    def _list(self, folders: Sequence[Path]) -> list[Files | None]:
        """Return the content of each folder; None for a folder that does not exist."""

    @abstractmethod
    def _read(self, paths: Sequence[Path]) -> list[bytes | None]:
        """Return the bytes of each file; None for a file that does not exist."""

    @abstractmethod
    def _put(self, path: Path, data: bytes) -> None:
        """Store a file, durably and in one step, in place of an older one."""

    @abstractmethod
    def put_file(self, path: Path, to: Path) -> None:
        """Store a copy of a local file, durably and in one step."""

    @abstractmethod
    def _rename(self, path: Path, to: Path) -> None:
        """Rename a small file.

        Raises:
            FileNotFoundError: it is gone.
        """

    @abstractmethod
    def remove_files(self, paths: Sequence[Path]) -> None:
        """Remove files. Ignore those that do not exist."""

    @abstractmethod
    def _data_files(self, index: _core.Index, files: Files) -> list[File | None]:
        """Return the data files of an index, given the content of its folder."""

    # --- looking

    def _numbers(self, names: Iterable[str]) -> list[int]:
        """Return the numbers of the steps among names in the root, in order."""
        found = [(self._pattern.fullmatch(name), name) for name in names]
        numbers = [(int(match[1]), name) for match, name in found if match is not None]
        return sorted(number for number, name in numbers if name == self.folder(number).name)

    def strangers(self, names: Collection[str]) -> str | None:
        """Return a warning of names in the root that look like checkpoints, and are no steps.

        Without any step in the root, folders that hold a checkpoint or steps are among them.

        Raises:
            CheckpointNotFoundError: the root is a checkpoint itself.
        """
        numbers = self._numbers(names)
        others = sorted(set(names).difference(self.folder(number).name for number in numbers))
        found = set(filter(_LOOKS_LIKE_A_STEP.fullmatch, others))
        if not numbers:
            if {INDEX_NAME, STOCK_NAME} & set(names):
                msg = (
                    f"{self.path} is a checkpoint itself, and no folder of steps: pass the folder "
                    "above it, or load it with dcp_rs.load"
                )
                raise CheckpointNotFoundError(msg, path=self.path)
            with suppress(OSError):  # a folder cannot be listed
                listed = self._list([self.path / name for name in others[:_OTHERS]])
                for name, files in zip(others, listed, strict=False):
                    if any(file in MARKS or self._pattern.fullmatch(file) for file in files or ()):
                        found.add(name)
        if not found:
            return None
        return (
            f"these may be or hold checkpoints, and are not looked at: {some(sorted(found))}. To "
            "resume from one, pass the folder of the steps, and their step_name=, such as "
            "step_name='iter_{:07d}'"
        )

    def supersede(self, keys: Iterable[str]) -> None:
        """Note that the saves with these keys are older than all others, whatever their numbers.

        Raises:
            RunTakenOverError: another run began here.
        """
        with self.holding():
            note = {"older": sorted({*self.superseded(), *keys})}
            self._put(self.path / notes.OLDER_NAME, json.dumps(note).encode())

    def superseded(self, names: Iterable[str] | None = None) -> set[str]:
        """Return the keys of the steps that are older than all others.

        Args:
            names: the names in the root, if they are known.
        """
        if notes.OLDER_NAME not in (self.names() if names is None else names):
            return set()
        (data,) = self._read([self.path / notes.OLDER_NAME])
        try:
            return set(map(str, json.loads(data or b"{}")["older"]))
        except (ValueError, TypeError, KeyError):
            return set()

    def is_run(self) -> bool:
        """Return whether the root has steps, and is no checkpoint itself."""
        try:
            names = self.names()
            if {INDEX_NAME, STOCK_NAME} & set(names):
                return False
            return any(self._list([self.folder(n)])[0] is not None for n in self._numbers(names))
        except (UnsupportedError, NotADirectoryError):  # a web server lists nothing
            return False

    def look(self, *, since: int = 0, recall: bool = False) -> Listing:
        """Look at the steps.

        Args:
            since: the first number.
            recall: do not look again at steps that were whole when they were last looked at.

        Raises:
            OSError: the root cannot be listed.
        """
        names = self.names()
        # The thread of the saves looks as well: the dict must not change meanwhile.
        known = dict(self._known)
        recalled, numbers = [], []
        for number in self._numbers(names):
            if recall and number in known:
                recalled.append(known[number][1])
            elif number >= since:
                numbers.append(number)
        found = [*recalled, *(step for step in self._look(numbers).values() if step is not None)]
        skipped = [step for step in found if isinstance(step, SkippedStep)]
        listed = {*numbers, *(step.number for step in recalled)}
        self._known = {n: step for n, step in list(self._known.items()) if n in listed}
        return Listing(
            _by_age([step for step in found if isinstance(step, Step)], self.superseded(names)),
            sorted(skipped, key=lambda step: step.number),
            names=names,
        )

    def look_again(self, listing: Listing, numbers: Collection[int]) -> list[Step]:
        """Return the whole steps of a listing after another look at some of them."""
        looked = [step for step in self._look(sorted(numbers)).values() if isinstance(step, Step)]
        others = [step for step in listing.steps if step.number not in numbers]
        return _by_age([*others, *looked], self.superseded(listing.names))

    def look_at(self, number: int) -> Step | SkippedStep | None:
        """Look at one step.

        Returns:
            The step; None if there is nothing.

        Raises:
            OSError: the step cannot be read, after several tries. It may be whole.
        """
        return self._look_at_some([number])[number]

    def newest(self, names: Sequence[str] | None = None) -> Iterator[Step | SkippedStep]:
        """Look at one step after the other, the newest first.

        Args:
            names: the names in the root, if they are known.

        Raises:
            OSError: as :meth:`look_at`.
        """
        names = self.names() if names is None else names
        older, superseded = [], self.superseded(names)
        for number in reversed(self._numbers(names)):
            found = self.look_at(number)
            if isinstance(found, Step) and found.key in superseded:
                older.append(found)
            elif found is not None:
                yield found
        yield from older

    def latest(self) -> Step | None:
        """Return the newest whole step.

        Raises:
            OSError: a newer step cannot be read, and may be whole.
        """
        return next((step for step in self.newest() if isinstance(step, Step)), None)

    def _look(self, numbers: Sequence[int]) -> dict[int, Step | SkippedStep | None]:
        found: dict[int, Step | SkippedStep | None] = {}
        for begin in range(0, len(numbers), _AT_ONCE):
            found |= self._look_at_some(numbers[begin : begin + _AT_ONCE])
        return found

    def _look_at_some(
        self, numbers: Sequence[int], looks: int = _LOOKS
    ) -> dict[int, Step | SkippedStep | None]:
        """Look at steps. Look again at those that changed meanwhile, or seem damaged."""
        found: dict[int, Step | SkippedStep | None] = dict.fromkeys(numbers)
        new: dict[int, Files] = {}
        # The listing comes before the index, which names only what was stored before it.
        for number, files in zip(numbers, self._list([*map(self.folder, numbers)]), strict=True):
            known = self._known.get(number)
            if known is not None and known[0] == files:
                found[number] = known[1]
                continue
            self._known.pop(number, None)  # else it would be recalled
            if files is not None:
                new[number] = files
        try:
            contents = self._read_contents(new)
            found |= {number: self._judge(number, new[number], contents[number]) for number in new}
        except StoragePreconditionError:  # replaced while it was read
            if looks == 1:
                raise
            return self._look_at_some(numbers, looks - 1)
        again = [
            number
            for number in new
            if None in contents[number].values()
            or (isinstance(step := found[number], SkippedStep) and step.kind == "damaged")
        ]
        if again and looks > 1:
            found |= self._look_at_some(again, looks - 1)
        return found

    def _read_contents(self, listed: Mapping[int, Files]) -> dict[int, dict[str, bytes | None]]:
        """Read the index and the notes of steps; None for a file that went after the listing."""
        wanted = [
            (number, name)
            for number, files in listed.items()
            for name, file in files.items()
            if (name == INDEX_NAME and file.is_file) or _is_note(name, file)
        ]
        contents: dict[int, dict[str, bytes | None]] = {number: {} for number in listed}
        paths = [self.folder(number) / name for number, name in wanted]
        for (number, name), data in zip(wanted, self._read(paths), strict=True):
            contents[number][name] = data
        return contents

    def _judge(
        self, number: int, files: Files, data: Mapping[str, bytes | None]
    ) -> Step | SkippedStep:
        """Return the state of a step, given its listing and the bytes of its index and notes."""
        kind: SkipKind = "damaged"
        try:
            if INDEX_NAME in files:
                return self._whole_step(number, files, data)
            if STOCK_NAME in files and files[STOCK_NAME].is_file:
                return self._stock_step(number, files)
            return self._unfinished_step(number, files, data)
        except StorageError:
            raise
        except UnsupportedError as error:  # a later version
            why, kind = str(error), "foreign"
        except (FileNotFoundError, DcpRsError) as error:
            why = str(error)
            read = filter(None, map(notes.read, data.values()))
            if any(note.upload is not None for note in read):
                why += (
                    ". This is the folder of a node (local=), and another node may have it: "
                    f"dcp-rs steps ROOT --local {self.path} counts its files"
                )
        return SkippedStep(number=number, path=self.folder(number), why=why, kind=kind)

    def _whole_step(self, number: int, files: Files, data: Mapping[str, bytes | None]) -> Step:
        """Return the step of an index.

        Raises:
            DcpRsError: the index does not open, or a data file is missing or has another length.
        """
        path = self.folder(number)
        content = data.get(INDEX_NAME)
        if content is None:
            raise CorruptDataError(f"its {INDEX_NAME} cannot be read", path=path)
        index = _core.Index.from_bytes(content, path / INDEX_NAME, False)
        entries = index.files()
        sizes: dict[Any, int] = {}
        reused, shared = 0, set()
        for entry, file, (used, is_linked) in zip(
            entries, self._data_files(index, files), index.use_of_files(), strict=True
        ):
            if file is None:
                raise CorruptDataError(f"its data file {entry.name} is gone", path=path)
            if file.nbytes != entry.size:
                msg = (
                    f"its data file {entry.name} has {file.nbytes:,} bytes, "
                    f"and should have {entry.size:,}"
                )
                raise CorruptDataError(msg, path=path)
            sizes[file.id] = file.nbytes
            if is_linked:
                reused += used
                shared.add(file.id)
        save_id = (index.save_id or "").replace("-", "")
        committed = files[INDEX_NAME].changed
        note = notes.read(data.get(saved_name(save_id)) or data.get(saving_name(save_id)))
        later = notes.read(data.get(annotated_name(save_id)))
        step = Step(
            number=number,
            path=path,
            save_id=save_id,
            saved=note.saved if note else committed,
            nbytes=len(content) + sum(sizes.values()),
            reused=reused,
            linked=sum(sizes[file] for file in shared) if self._shares_files else 0,
            files=sizes,
            metrics={**(note.metrics if note else {}), **(later.metrics if later else {})},
            verified=verified_name(save_id) in files,
            note=note,
            committed=committed,
        )
        # The listing tells of all its data, and nothing of it went.
        if all(entry.name in files for entry in entries) and None not in data.values():
            self._known[number] = files, step
        return step

    def _stock_step(self, number: int, files: Files) -> Step:
        """Return the step of a checkpoint of torch, which writes its metadata last."""
        step = Step(
            number=number,
            path=self.folder(number),
            save_id="",
            saved=files[STOCK_NAME].changed,
            committed=files[STOCK_NAME].changed,
            nbytes=sum(file.nbytes for file in files.values()),
            is_stock=True,
        )
        self._known[number] = files, step
        return step

    #: Whether steps share the files that they reuse.
    _shares_files: bool

    def _unfinished_step(
        self, number: int, files: Files, data: Mapping[str, bytes | None]
    ) -> SkippedStep:
        """Return the state of a folder without an index."""
        read = {name: note for name in data if (note := notes.read(data[name])) is not None}
        others = {n for n in files if not (_PASSING.fullmatch(n) or notes.is_own(n))}
        others.difference_update(*(note.files for note in read.values()))
        saving = [note for name, note in read.items() if name.startswith("saving-")]
        has_run = self.run is not None and any(note.run is not None for note in saving)
        is_over = has_run and saving_name(self._saving) not in read
        kind = self._kind_of_unfinished(number, files, is_over=is_over)
        models = () if saving or kind == "in use" else self._models(number, files, others)
        if models:
            kind = "foreign"
        newest = max(saving, key=lambda note: note.saved, default=None)
        why = {
            "in use": f"{newest.process if newest else 'a process'} is saving it",
            "foreign": (
                f"it has no {INDEX_NAME}, and holds {min(models, default='')}: "
                "dcp_rs.index(path) may adopt it"
            ),
            "no index": (
                f"it is complete, but its {INDEX_NAME} is gone: dcp_rs.index(path) makes it"
            ),
            "unknown": "its save did not finish, or goes on: nothing here tells which",
            "unfinished": "its save did not finish",
        }[kind]
        is_empty = files.keys() <= {_core.LOCK_NAME}
        return SkippedStep(
            number=number,
            path=self.folder(number),
            why=why,
            kind=kind,
            is_over=is_over,
            is_left=kind == "unfinished" and not others and not is_empty,
        )

    def _models(self, number: int, files: Files, others: Iterable[str]) -> list[str]:
        """Return the files and folders that may be a checkpoint of another program."""
        names = [name for name in others if is_foreign(name) or name.endswith(_MODELS)]
        folders = [name for name in others if not files[name].is_file]
        listed = self._list([self.folder(number) / name for name in folders])
        return names + [
            name
            for name, inner in zip(folders, listed, strict=True)
            if MARKS & (inner or {}).keys()
        ]

    @abstractmethod
    def _kind_of_unfinished(self, number: int, files: Files, *, is_over: bool) -> SkipKind:
        """Return what is known of a save without an index. If ``is_over``, it cannot commit."""

    # --- the run

    @abstractmethod
    def _lock(self) -> RunNote:
        """Take the lock of the root, if it has locks. Return the note of the run."""

    def take_over(self) -> None:
        """Begin a run here. After that, an earlier run can neither commit nor remove anything.

        Raises:
            SaveInProgressError: another process has kept the root locked for ten minutes.
            OSError: the note of the run cannot be written.
        """
        run = uuid.uuid4().hex
        note = self._lock()
        try:
            note.write(notes.write(run).ljust(_RUN_NOTE_BYTES), self.fsync)
        finally:
            del note  # an error would keep the lock
        self.run, self.since = run, self._now()
        self._known.clear()  # the earlier run may have saved steps anew

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Hold the root for this run. A process that has not taken it over may hold it too.

        Raises:
            RunTakenOverError: another run began here.
            SaveInProgressError: another process has kept the root locked for ten minutes.
        """
        if self.run is None:
            yield
            return
        held = self._lock()
        try:
            # Nothing is noted if somebody removed the folder meanwhile.
            if data := held.read():
                note = notes.read(data)
                if note is None or note.run != self.run:
                    msg = (
                        f"the run in {self.path} was taken over by "
                        f"{note.process if note else 'an unknown process'}: "
                        "this process may not save or remove steps any more"
                    )
                    raise RunTakenOverError(msg, path=self.path)
            yield
        finally:
            del held  # as above

    def check_run(self) -> None:
        """Raise a ``RunTakenOverError`` if another run began here."""
        with self.holding():
            pass

    @abstractmethod
    def _now(self) -> float:
        """Return the time by the clock that dates files, in seconds since 1970."""

    # --- a save

    def begin(
        self,
        number: int,
        save_id: str,
        metrics: Mapping[str, float],
        files: Iterable[str] = (),
        **more: bool | float,
    ) -> None:
        """Create the folder of a step, with the note of the save.

        Args:
            number: the number of the step.
            save_id: the id of the save.
            metrics: its metrics.
            files: the names of files of the user, which :meth:`put_files` puts into the folder.
            more: see :class:`dcp_rs.steps.notes.Note`. By default the save begins now.
        """
        note = self.folder(number) / saving_name(save_id)
        content = {"step": number, "metrics": dict(metrics), "files": sorted(files), **more}
        self._put(note, notes.write(self.run, **content))
        self._saving = save_id

    def lengths(self, number: int) -> dict[str, int]:
        """Return the length of each file in the folder of a step, by name."""
        files = self._list([self.folder(number)])[0] or {}
        return {name: file.nbytes for name, file in files.items() if file.is_file}

    def put_files(self, number: int, files: Mapping[str, bytes]) -> None:
        """Put files of the user into the folder of a step."""
        for name, data in files.items():
            self._put(self.folder(number) / name, data)

    def settle(self, number: int, save_id: str) -> None:
        """Note that a save is committed. Remove the notes and the user's files of other saves."""
        self._known.pop(number, None)  # this save may have replaced it
        folder = self.folder(number)
        saved = folder / saved_name(save_id)
        self._rename(folder / saving_name(save_id), saved)
        listed = self._list([folder])[0] or {}
        names = {name for name, file in listed.items() if _is_note(name, file)}
        others = [folder / name for name in names if notes.id_of(name) != save_id]
        own, *read = [notes.read(data) for data in self._read([saved, *others])]
        theirs = {file for note in read if note and own for file in note.files - own.files}
        self.remove_files([folder / file for file in theirs])
        self.remove_files(others)  # last, as they tell what the files are

    def annotate(self, step: Step, metrics: Mapping[str, float]) -> None:
        """Store metrics that came after the save, beside those that were stored before."""
        path = step.path / annotated_name(step.save_id)
        note = notes.read(self._read([path])[0])
        before = {} if note is None else note.metrics
        self._put(path, notes.write(step.run, metrics={**before, **metrics}))

    def point_to(self, number: int) -> None:
        """Let the file ``latest`` in the root contain the name of a step."""
        self._put(self.path / "latest", self.folder(number).name.encode())

    def verify(self, step: Step) -> VerifyReport:
        """Read all of a step, and note it if it matches its digests."""
        report = verify(step.path, **self.access)
        if report.ok and not report.bytes_without_digest:
            self._put(step.path / verified_name(step.save_id), b"{}")
        return report

    # --- removal

    @abstractmethod
    def remove(self, number: int) -> None:
        """Remove a step. A kill meanwhile leaves the whole step, or no step.

        Raises:
            RunTakenOverError: another run began here.
            OSError: it cannot be removed.
        """

    def aside(self, names: Iterable[str]) -> list[Path]:
        """Return the folders of removed steps that could not be deleted yet.

        Args:
            names: the names in the root.
        """
        return []

    def sweep(self, *, since: int = 0) -> Listing:
        """Remove the leftovers of killed removals and killed saves (:attr:`Listing.left`).

        Args:
            since: look at no steps before this one, and at none twice that was whole.

        Returns:
            The steps before the sweep. What could not be removed is in :attr:`problems`.

        Raises:
            RunTakenOverError: another run began here.
        """
        found = self.look(since=since, recall=True)
        for left in found.left:
            try:
                self.remove_left(left)
            except OSError as error:
                what = f"{left.path}, of a save that did not finish,"
                self.problems.append(f"{what} is still there: {error}")
        return found

    @abstractmethod
    def remove_left(self, left: SkippedStep) -> None:
        """Remove what a killed save left of a step, unless it changed after the look.

        Raises:
            RunTakenOverError: another run began here.
            OSError: it cannot be removed.
        """
