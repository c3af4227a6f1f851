"""What of a checkpoint a training load takes, and what it leaves alone: known before anything is read."""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner

from dcp_rs.dcp.load_planner import RsLoadPlanner
from dcp_rs.engine.arguments import check_planner
from dcp_rs.engine.metadata import index_of
from dcp_rs.engine.reports import LoadReport, Mismatch
from dcp_rs.errors import PlanError

__all__ = ["Choice"]


class Choice:
    """The choice of one load. What is left alone is not given to the planner, and goes into ``report``.

    Args:
        metadata: of the checkpoint.
        planner: of the load; what one of :class:`RsLoadPlanner` excludes is left alone.
        partial: so is what the checkpoint lacks.

    Attributes:
        is_partial: as given.
        is_lenient: what the checkpoint does not wholly hold, or has in another shape, is left
            alone. Otherwise that is an error.
        report: what is left alone.
    """

    def __init__(self, metadata: Metadata, planner: LoadPlanner, *, partial: bool) -> None:
        check_planner("load", planner)
        own = planner if isinstance(planner, RsLoadPlanner) else None
        names = None if own is None else own.names
        self.is_partial = partial
        self.is_lenient = partial or bool(getattr(planner, "allow_partial_load", False))
        self.report = LoadReport()
        self._metadata = metadata
        self._planner = own
        self._names = names if names is not None and names.is_selective else None
        self._looks_for_holes = self.is_lenient or own is None  # an RsLoadPlanner refuses them

    @property
    def leaves_some(self) -> bool:
        """Whether anything may be left alone."""
        return self.is_lenient or self._names is not None

    def wants(self, name: str) -> bool:
        """Whether the planner takes an entry of this name."""
        return self._names is None or self._names.wants(name)

    def left_out(self, names: Iterable[str]) -> set[str]:
        """Those of the names that the planner does not take."""
        left = [name for name in names if not self.wants(name)]
        self.report.excluded += left
        return set(left)

    def held_in_part(self, names: Iterable[str]) -> set[str]:
        """Those of the names that are tensors of which the checkpoint does not hold all elements.

        Raises:
            PlanError: there are some, and that is an error.
        """
        if not self._looks_for_holes:
            return set()
        index = index_of(self._metadata)
        assert index is not None  # noqa: S101  # an RsReader read it
        tensors = [(number, name) for name in names if (number := index.find(name)) is not None]
        whole = [
            (number, index.tensor(number).shape, name)
            for number, name in tensors
            if not index.tensor(number).is_bytes
        ]
        holes = index.check_regions(
            [(number, (0,) * len(shape), shape) for number, shape, _ in whole], []
        )
        if holes and not self.is_lenient:
            at, offsets, sizes = holes[0]
            msg = f"tensor {whole[at][2]!r}: the checkpoint does not hold {list(sizes)} elements at {list(offsets)}"
            raise PlanError(msg, tensor=whole[at][2])
        found = list(dict.fromkeys(whole[at][2] for at, _, _ in holes))
        self.report.partly_filled += found
        return set(found)

    def refuse(self, name: str, expected: tuple[int, ...], got: tuple[int, ...]) -> None:
        """Notes that a tensor is stored in another shape than it has here.

        Raises:
            PlanError: that is an error.
        """
        if not self.is_lenient:
            msg = f"tensor {name!r} has shape {tuple(expected)} in the optimizer, and {tuple(got)} in the checkpoint"
            raise PlanError(msg, tensor=name)
        self.report.shape_mismatched.append(Mismatch(name, tuple(expected), tuple(got)))

    def tell(self, beside: Iterable[str]) -> None:
        """Puts what was left alone into the planner's report, if it has one.

        Args:
            beside: what names begin with that were read before there was a plan, or are there for
                other ranks.
        """
        if self._planner is None:
            return
        report, mine = self._planner.report, self.report
        report.missing += mine.missing
        report.excluded += mine.excluded
        report.partly_filled += mine.partly_filled
        report.shape_mismatched += mine.shape_mismatched
        known = {
            *mine.excluded,
            *mine.partly_filled,
            *(mismatch.name for mismatch in mine.shape_mismatched),
        }
        prefixes = tuple(beside)
        report.unexpected = [
            name
            for name in report.unexpected
            if name not in known
            and not any(name == p or name.startswith(f"{p}.") for p in prefixes)
        ]
