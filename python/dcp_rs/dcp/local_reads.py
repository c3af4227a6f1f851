"""What one rank reads for its own plan: a few lists, without an object for every item."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch

from dcp_rs import _core
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs.tensors.boxes import narrow
from dcp_rs.tensors.dtypes import NAMES as DTYPE_NAMES
from dcp_rs.transfer.load import Load
from dcp_rs.transfer.replicas import Offer
from dcp_rs.transfer.target import Target

__all__ = ["Begun", "LocalReads"]


@dataclass
class LocalReads:
    """What one rank reads, without items: whole tensors, regions of tensors, and values (index, name).

    ``plain`` is what ``whole`` was made of: stored names, tensors, and the places of those that are not in it.
    """

    index: _core.Index
    whole: _core.Batch | None = None
    plain: tuple[list[str], list[torch.Tensor], list[int]] = field(default_factory=lambda: ([], [], []))
    targets: list[Target] = field(default_factory=list)
    values: list[tuple[int, str]] = field(default_factory=list)

    def plan_plain(self, wanted: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, int]:
        """Plans the tensors that are plain and fit what is stored, in one call for all.

        Args:
            wanted: stored names, by names in the state dict.
            values: the state dict.

        Returns:
            The others, with their places among all that is wanted.
        """
        names, tensors = list(wanted.values()), [values[fqn] for fqn in wanted]
        self.whole, others = self.index.plan_plain(names, tensors, PLAIN_TYPES, DTYPE_NAMES)
        self.plain = (names, tensors, others)
        fqns = list(wanted) if others else []
        return {fqns[i]: i for i in others}

    def tensors(self) -> list[torch.Tensor]:
        """All that is filled."""
        _, plain, others = self.plain
        if others:
            left_out = set(others)
            plain = [tensor for i, tensor in enumerate(plain) if i not in left_out]
        return [*plain, *(target.tensor for target in self.targets)]

    @property
    def nbytes(self) -> int:
        """Of all tensors, as they are stored."""
        tensors = self.tensors()
        plain = sum(tensor.nbytes for tensor in tensors[: len(tensors) - len(self.targets)])
        return plain + sum(target.nbytes for target in self.targets)

    def stored_names(self) -> tuple[list[str], Iterable[str]]:
        """Of values, and of tensors."""
        values = [self.index.name(value) for value, _ in self.values]
        others = (target.index for target in self.targets if not target.of_chunk)
        return values, chain(self.plain[0], (self.index.name(tensor) for tensor in others))

    def add_covered(
        self, targets: list[tuple[str, Target]], fill_partly: Callable[[str, Iterable[int], Iterable[int]], bool]
    ) -> None:
        """Adds targets, as far as the checkpoint holds them. Finds what no chunk holds, and data files that are missing or of another length.

        Args:
            targets: each with its name in the state dict.
            fill_partly: hears of elements of a name that no chunk holds, and says whether the others are to be read.
        """
        regions = [(target.index, target.offsets, target.tensor.shape) for _, target in targets]
        holes = self.index.check_regions(regions, [value for value, _ in self.values])
        left_alone = {targets[at][0] for at, offsets, sizes in holes if not fill_partly(targets[at][0], offsets, sizes)}
        in_part = {at for at, _, _ in holes}
        for at, (fqn, target) in enumerate(targets):
            if fqn in left_alone:
                continue
            if at not in in_part:
                self.targets.append(target)
                continue
            for held in self.index.touching(target.index, target.offsets, target.tensor.shape):
                part = narrow(target.tensor, held.region_offsets, held.sizes)
                self.targets.append(
                    replace(target, index=held.chunk, of_chunk=True, offsets=held.chunk_offsets, tensor=part)
                )


@dataclass
class Begun:
    """A load of such reads that can only fail for its data now: in how many turns it is done, the values, and what others may need as well."""

    reads: LocalReads
    load: Load
    turns: int
    values: dict[str, Any]
    offer: Offer
