"""Names of modules and parameters without the prefixes of wrappers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cached_property

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dcp_rs import _torch
from dcp_rs.checkpoint.names import renamer
from dcp_rs.errors import PlanError
from dcp_rs.options import Rename

#: What torch.compile, activation checkpointing and FSDP1 put into names.
_PREFIXES = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?:\.|$)"
)
#: What DDP puts before names. Modules have that name, too.
_MODULE = re.compile(r"(?:^|(?<=\.))module\.")
_MODEL = "model."


def unwrapper(model: torch.nn.Module) -> Callable[[str], str]:
    """Return a function that maps names of a model's modules and entries to those without wrappers.

    The prefixes of wrappers go wherever they are.
    """
    of_ddp = 0
    inner = _torch.without_compiler(model)
    while isinstance(inner, DataParallel | DistributedDataParallel):
        of_ddp += 1
        inner = _torch.without_compiler(inner.module)

    def unwrap(name: str) -> str:
        name = _without_prefixes(name)
        for _ in range(of_ddp):
            name = name.removeprefix("module").removeprefix(".")
        return name

    return unwrap


def _without_prefixes(name: str) -> str:
    # A regular expression is slow, and most names have no such prefix.
    return _PREFIXES.sub("", name).removesuffix(".") if "_mod" in name else name


class StoredNames:
    """Stored names of a model, by the names that the model has now.

    Prefixes of wrappers are no part of a name.

    Args:
        stored: the stored names, without the key of the model.
        rename: as for :func:`dcp_rs.load`, of names below ``model``.
    """

    def __init__(self, stored: Iterable[str], rename: Rename) -> None:
        self._stored = dict.fromkeys(stored)
        self._rename = None if rename is None else renamer(rename)

    def find(self, fqn: str) -> str | None:
        """Return the stored name of an entry, or None if there is none.

        Raises:
            PlanError: two entries have that name now.
        """
        if self._rename is None and fqn in self._stored:
            return fqn
        found = self._by_name.get(fqn) or self._by_name_without_ddp.get(fqn, [])
        if found[1:]:
            msg = f"{found[0]!r} and {found[1]!r} of the checkpoint would both be named {fqn!r}"
            raise PlanError(msg, tensor=fqn)
        return found[0] if found else None

    @cached_property
    def _by_name(self) -> dict[str, list[str]]:
        by_name: dict[str, list[str]] = {}
        for stored in self._stored:
            name = _without_prefixes(stored)
            if self._rename is not None:
                name = self._rename(_MODEL + name)
                if not name.startswith(_MODEL):
                    continue
                name = name.removeprefix(_MODEL)
            by_name.setdefault(name, []).append(stored)
        return by_name

    @cached_property
    def _by_name_without_ddp(self) -> dict[str, list[str]]:
        by_name: dict[str, list[str]] = {}
        for name, stored in self._by_name.items():
            by_name.setdefault(_MODULE.sub("", name), []).extend(stored)
        return by_name
