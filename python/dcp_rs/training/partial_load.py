"""The entries that a load of training state leaves alone. They are known before data is read."""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed.checkpoint.planner import LoadPlanner

from dcp_rs.dcp.load_planner import RsLoadPlanner
from dcp_rs.dcp.protocol import check_planner
from dcp_rs.engine.reports import LoadReport, Mismatch
from dcp_rs.errors import PlanError
from dcp_rs.tensors.nesting import Container, remaining
from dcp_rs.training.saved_tree import SavedEntries, SavedTree, join

__all__ = ["PartialLoad"]


class PartialLoad:
    """The entries that one load leaves alone. The planner does not get them.

    Args:
        entries: the checkpoint.
        planner: the planner of the load. Entries that an :class:`RsLoadPlanner` excludes are left
            alone.
        partial: leave alone what the checkpoint lacks, has not all of, or has in another shape.
            Otherwise that is an error.

    Attributes:
        is_partial: as given.
        report: what is left alone.
    """

    def __init__(self, entries: SavedEntries, planner: LoadPlanner, *, partial: bool) -> None:
        check_planner("load", planner)
        own = planner if isinstance(planner, RsLoadPlanner) else None
        self.is_partial = partial
        self.report = LoadReport()
        self._index = entries.index
        self._planner = own
        self._names = own.names if own is not None and own.names.is_selective else None
        # An RsLoadPlanner raises for incomplete tensors itself.
        self._checks_completeness = self.is_partial or own is None

    @property
    def may_leave(self) -> bool:
        """True if the load may leave entries alone."""
        return self.is_partial or self._names is not None

    def includes(self, name: str) -> bool:
        """Return whether the planner includes an entry of this name."""
        return self._names is None or self._names.wants(name)

    def exclude(self, names: Iterable[str]) -> set[str]:
        """Return the names that the planner does not include, and report them."""
        excluded = [name for name in names if not self.includes(name)]
        self.report.excluded += excluded
        return set(excluded)

    def remaining(self, tree: SavedTree, above: str) -> list[Container]:
        """Return the containers of a tree that are not excluded, or hold what the tree has.

        Args:
            tree: a tree of the checkpoint.
            above: the name of its place.
        """
        return remaining(
            tree.containers, tree.paths.values(), lambda name: self.includes(join(above, name))
        )

    def incomplete(self, names: Iterable[str]) -> set[str]:
        """Return the names of tensors that lack elements in the checkpoint, and report them.

        Raises:
            PlanError: there are some, and that is an error.
        """
        if not self._checks_completeness:
            return set()
        index = self._index
        tensors, regions = [], []
        for name in names:
            number = index.find(name)
            if number is not None and not (tensor := index.tensor(number)).is_bytes:
                tensors.append(name)
                regions.append((number, (0,) * len(tensor.shape), tensor.shape))
        holes = index.check_regions(regions, [])
        if holes and not self.is_partial:
            at, offsets, sizes = holes[0]
            name = tensors[at]
            msg = (
                f"tensor {name!r}: the checkpoint does not hold {list(sizes)} elements at "
                f"{list(offsets)}"
            )
            raise PlanError(msg, tensor=name)
        found = list(dict.fromkeys(tensors[at] for at, _, _ in holes))
        self.report.partly_filled += found
        return set(found)

    def refuse_shape(self, name: str, expected: tuple[int, ...], got: tuple[int, ...]) -> None:
        """Report that a tensor has another shape in the checkpoint.

        Raises:
            PlanError: that is an error.
        """
        if not self.is_partial:
            msg = (
                f"tensor {name!r} has shape {tuple(expected)} in the optimizer, and {tuple(got)} "
                "in the checkpoint"
            )
            raise PlanError(msg, tensor=name)
        self.report.shape_mismatched.append(Mismatch(name, tuple(expected), tuple(got)))

    def complete_report(self, read_before: Iterable[str]) -> None:
        """Add what was left alone to the report of the planner, if it has one.

        Args:
            read_before: prefixes of names that no plan has: they were read before it, or are
                entries of other ranks.
        """
        if self._planner is None:
            return
        report, own = self._planner.report, self.report
        report.missing += own.missing
        report.excluded += own.excluded
        report.partly_filled += own.partly_filled
        report.shape_mismatched += own.shape_mismatched
        known = {*own.excluded, *own.partly_filled, *(found.name for found in own.shape_mismatched)}
        above = tuple(f"{name}." for name in read_before)
        report.unexpected = [
            name
            for name in report.unexpected
            if name not in known and not f"{name}.".startswith(above)
        ]
