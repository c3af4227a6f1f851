"""The entries that a load of training state leaves alone. They are known before data is read."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from dcp_rs.checkpoint.names import LoadNames
from dcp_rs.engine.reports import LoadReport, Mismatch
from dcp_rs.errors import PlanError
from dcp_rs.training.saved_tree import join
from dcp_rs.training.sources import Part

#: The parts of a training state that may be loaded in part.
PARTS = ("model", "optimizer", "extra")


def parts_of(partial: bool | Collection[str]) -> set[str]:
    """Return the parts that ``partial=`` names; all for True.

    Raises:
        TypeError: it is neither a bool nor a collection of these names.
    """
    if isinstance(partial, bool):
        return set(PARTS) if partial else set()
    if isinstance(partial, str) or not isinstance(partial, Collection):
        raise TypeError(f"partial={partial!r}: pass True, or a set of {', '.join(PARTS)}")
    if unknown := set(partial).difference(PARTS):
        msg = f"partial= has {min(map(str, unknown))!r}, and takes {', '.join(PARTS)}"
        raise TypeError(msg)
    return set(partial)


@dataclass
class PartialLoad:
    """Load of one part of a training state, and what it leaves alone.

    Attributes:
        part: the place of the part in a checkpoint.
        names: the names that the load includes.
        report: notes what is left alone.
        usual: the key of the part in a training state, by which ``names`` go.
        is_partial: leave alone what the checkpoint lacks, has not all of, or has in another shape.
            Otherwise that is an error.
    """

    part: Part
    names: LoadNames
    report: LoadReport
    usual: str
    is_partial: bool

    @property
    def may_leave(self) -> bool:
        """True if the load may leave entries alone."""
        return self.is_partial or self.names.is_selective

    def includes(self, name: str) -> bool:
        """Return whether the load includes an entry of the checkpoint."""
        prefix = self.part.prefix
        if prefix != self.usual:
            name = join(self.usual, name.removeprefix(prefix).removeprefix("."))
        return self.names.wants(name)

    def takes(self, names: Collection[str], usual: Iterable[str] | None = None) -> bool:
        """Return whether the load takes state that has these entries: all of it, or nothing.

        It reports what it leaves alone. Incomplete tensors are an error of the load that reads
        them, unless it is partial.

        Args:
            names: the names of the entries in the checkpoint.
            usual: their names in a training state, below the place of the part; default: the same.
        """
        if not all(map(self.includes, names if usual is None else usual)):
            self.report.excluded += names
            return False
        incomplete = self._incomplete(names) if self.is_partial else []
        if not incomplete:
            return True
        self.report.incomplete += incomplete
        self.report.excluded += [name for name in names if name not in incomplete]
        return False

    def _incomplete(self, names: Iterable[str]) -> list[str]:
        """Return the names of tensors that lack elements in the checkpoint."""
        tensors, regions = [], []
        index = self.part.entries.index
        for name in names:
            number = index.find(name)
            if number is not None and not (tensor := index.tensor(number)).is_bytes:
                tensors.append(name)
                regions.append((number, (0,) * len(tensor.shape), tensor.shape))
        holes = index.check_regions(regions, [])
        return list(dict.fromkeys(tensors[at] for at, _, _ in holes))

    def miss(self, name: str, advice: str = "") -> None:
        """Report that the checkpoint lacks an entry.

        Args:
            name: the name of the entry.
            advice: the end of the message.

        Raises:
            PlanError: that is an error.
        """
        if not self.includes(name):
            self.report.excluded.append(name)
        elif self.is_partial:
            self.report.missing.append(name)
        else:
            raise PlanError(f"the checkpoint has no {name!r}{advice}", tensor=name)

    def refuse_shape(
        self, name: str, expected: tuple[int, ...], got: tuple[int, ...], where: str
    ) -> None:
        """Report that a tensor has another shape in the checkpoint.

        Raises:
            PlanError: that is an error.
        """
        if not self.is_partial:
            msg = (
                f"tensor {name!r} has shape {tuple(expected)} in {where}, and {tuple(got)} "
                "in the checkpoint"
            )
            raise PlanError(msg, tensor=name)
        self.report.shape_mismatched.append(Mismatch(name, tuple(expected), tuple(got)))
