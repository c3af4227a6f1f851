"""Places of model, optimizer and extra entries in checkpoints of every layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcp_rs.checkpoint.names import some
from dcp_rs.dcp.reader import RsReader
from dcp_rs.engine.metadata import index_of
from dcp_rs.errors import PlanError
from dcp_rs.training.saved_tree import SavedEntries, join, path_of

#: The keys of a training state.
MODEL, OPTIM = "model", "optim"
#: Other keys that people give to the same entries. The first that is there counts.
_MODELS = (MODEL, "model_state_dict", "state_dict", "module")
_OPTIMIZERS = (OPTIM, "optimizer", "optimizer_state_dict", "optim_state_dict")
#: The most names to tell by where the model is.
_SAMPLED = 50
#: Files and folders that accelerate's ``save_state`` writes, with the key of the entry in each.
_MODELS_OF_ACCELERATE = {
    "pytorch_model_fsdp_0": MODEL,
    "pytorch_model_fsdp.bin": "",
    "model.safetensors": "",
    "model.safetensors.index.json": "",
    "pytorch_model.bin": "",
}
_OPTIMIZERS_OF_ACCELERATE = {"optimizer_0": "optimizer", "optimizer.bin": ""}


@dataclass
class Part:
    """One entry of a training state.

    Attributes:
        reader, entries: the checkpoint.
        template: what is loaded from that checkpoint, of other entries too.
        prefix, path: the key of the entry in it, and its path.
        sent: values that other ranks sent, by their names.
    """

    reader: RsReader
    entries: SavedEntries
    template: dict[str, Any]
    prefix: str
    path: tuple[str, ...]
    sent: Mapping[str, Any]

    def read(self, name: str) -> Any:
        """Return a value of the checkpoint."""
        return self.sent[name] if name in self.sent else self.reader._read_value(name)

    def is_there(self) -> bool:
        """Return whether the checkpoint has the entry."""
        return bool(self.entries.below(self.prefix))


class Parts:
    """The entries of a training state at a path.

    Args:
        path: a checkpoint, or a folder that accelerate's ``save_state`` wrote.
        open_reader: opens a checkpoint.
        names: the keys of entries, by ``"model"``, ``"optimizer"`` or the name of an extra entry.
        extra: the names of the extra entries.

    Attributes:
        sent: values at the path that other ranks sent, by their names.

    Raises:
        TypeError: ``names`` has another name.
    """

    def __init__(
        self,
        path: Any,
        open_reader: Callable[[Any], RsReader],
        names: Mapping[str, str],
        extra: Collection[str],
    ) -> None:
        unknown = [name for name in names if name not in ("model", "optimizer", *extra)]
        if unknown:
            msg = f"names= has {unknown[0]!r}: its keys are 'model', 'optimizer' and names of extra"
            raise TypeError(msg)
        self._path, self._open, self._names = path, open_reader, names
        self.sent: dict[str, Any] = {}
        self._opened: dict[Any, tuple[RsReader, SavedEntries, dict[str, Any]]] = {}
        self._folder: Path | None = None
        if not names and "://" not in str(path):
            folder = Path(path)
            if any((folder / name).exists() for name in _OPTIMIZERS_OF_ACCELERATE):
                self._folder = folder

    def opened(self) -> list[tuple[RsReader, SavedEntries, dict[str, Any]]]:
        """Return all checkpoints that were opened, with what is loaded from each."""
        return list(self._opened.values())

    def model(self, fqns: Collection[str]) -> Part:
        """Return the model: under a usual key, or with the names of the modules themselves.

        Args:
            fqns: the names of the modules' entries.
        """
        if self._folder is not None:
            return self._of_accelerate(_MODELS_OF_ACCELERATE, "model")
        if "model" in self._names:
            return self._required("model")
        parts = [self._part(self._path, prefix) for prefix in (*_MODELS, "")]
        # Names of Hugging Face models begin with "model." themselves.
        sample = list(itertools.islice(fqns, _SAMPLED))
        found = [len(part.entries.find(join(part.prefix, f) for f in sample)) for part in parts]
        if any(found):
            return parts[found.index(max(found))]
        if parts[0].reader.source == "safetensors":
            return parts[-1]
        return next((part for part in parts[:-1] if part.is_there()), parts[0])

    def optimizer(self, key: str | None = None) -> Part:
        """Return the state of the optimizers.

        Args:
            key: its key. Default: that of ``names``, or a usual one.
        """
        if key is not None:
            return self._part(self._path, key)
        if self._folder is not None:
            return self._of_accelerate(_OPTIMIZERS_OF_ACCELERATE, "optimizer")
        if "optimizer" in self._names:
            return self._required("optimizer")
        parts = [self._part(self._path, prefix) for prefix in _OPTIMIZERS]
        groups = [part for part in parts if part.entries.below(join(part.prefix, "param_groups"))]
        return next((part for part in [*groups, *parts] if part.is_there()), parts[0])

    def entry(self, name: str) -> Part:
        """Return an extra entry."""
        if self._folder is not None:
            files = [self._folder / f"{name}{suffix}" for suffix in (".bin", ".pt", ".pkl")]
            found = next((file for file in files if file.is_file()), None)
            if found is None:
                raise PlanError(f"{self._folder} has no file of {name!r}: {files[0].name}")
            return self._part(found, "")
        if name in self._names:
            return self._required(name)
        part = self._part(self._path, f"extra.{name}", ("extra", name))
        other = self._part(self._path, name, (name,))
        return other if other.is_there() and not part.is_there() else part

    def _required(self, name: str) -> Part:
        part = self._part(self._path, self._names[name])
        if not part.is_there():
            tops = {known.partition(".")[0] for known in part.entries.names}
            msg = f"names={{{name!r}: {part.prefix!r}}}: the checkpoint has {some(sorted(tops))}"
            raise PlanError(msg)
        return part

    def _of_accelerate(self, files: Mapping[str, str], what: str) -> Part:
        assert self._folder is not None  # noqa: S101  # the caller looked
        name = next((name for name in files if (self._folder / name).exists()), None)
        if name is None:
            raise PlanError(f"{self._folder} has no {what}: none of {', '.join(files)} is there")
        return self._part(self._folder / name, files[name])

    def _part(self, path: Any, prefix: str, parts: tuple[str, ...] | None = None) -> Part:
        if path not in self._opened:
            reader = self._open(path)
            index = index_of(reader.read_metadata())
            assert index is not None  # noqa: S101  # an RsReader read it
            self._opened[path] = reader, SavedEntries(index), {}
        sent = self.sent if path == self._path else {}
        path_of_entry = path_of(prefix) if parts is None else parts
        return Part(*self._opened[path], prefix, path_of_entry, sent)
