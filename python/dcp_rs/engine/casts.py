"""The rule for dtype casts: which a load makes, which it warns of, and which it refuses."""

from __future__ import annotations

from typing import Literal

import torch

from dcp_rs._warnings import warn_caller
from dcp_rs.engine.reports import LoadReport, Mismatch
from dcp_rs.errors import PlanError

__all__ = ["CastRule", "can_copy", "check_cast"]

_COPIES: dict[tuple[torch.dtype, torch.dtype], bool] = {}


def can_copy(source: torch.dtype, destination: torch.dtype) -> bool:
    """Whether torch converts the one into the other without losing what kind of number it is."""
    known = _COPIES.get((source, destination))
    if known is None:
        known = not (source.is_complex and not destination.is_complex)  # torch drops the imaginary part
        try:
            if known:
                torch.zeros(1, dtype=torch.uint8, device="cpu").expand(16).clone().view(source)[:1].to(destination)
        except (RuntimeError, NotImplementedError, TypeError):
            known = False
        _COPIES[source, destination] = known
    return known


def check_cast(fqn: str, wanted: torch.dtype, stored: torch.dtype | None) -> None:
    """Raises unless a tensor can be cast.

    Raises:
        PlanError: it cannot be.
    """
    if stored is None or not can_copy(stored, wanted):
        msg = f"tensor {fqn!r} is stored as {stored}, which cannot be cast to {wanted}"
        raise PlanError(msg, tensor=fqn)


class CastRule:
    """What it means that state dict and checkpoint differ in dtype.

    Args:
        wish: what floating-point tensors are to become: such a cast needs no word.
        policy: of all others: ``"warn"`` casts and says so, ``"error"`` refuses, ``"cast"`` casts.

    Raises:
        ValueError: another policy.
    """

    def __init__(self, wish: torch.dtype | None, policy: Literal["warn", "error", "cast"]) -> None:
        if policy not in ("warn", "error", "cast"):
            msg = f"dtype_policy={policy!r}: must be one of 'warn', 'error', 'cast'"
            raise ValueError(msg)
        self._wish = wish
        self._policy = policy

    def check(self, fqn: str, wanted: torch.dtype, stored: torch.dtype | None, report: LoadReport) -> None:
        """Notes in the report that a tensor is cast.

        Raises:
            PlanError: it cannot be, or the policy refuses it.
        """
        check_cast(fqn, wanted, stored)
        is_wish = self._wish is not None and wanted == self._wish
        if self._policy == "error" and not is_wish:
            msg = f"tensor {fqn!r} is {wanted} in the state dict, and {stored} in the checkpoint (dtype_policy='error')"
            raise PlanError(msg, tensor=fqn)
        if not is_wish:
            report.dtype_mismatched.append(Mismatch(fqn, wanted, stored))

    def warn(self, report: LoadReport) -> None:
        """Says what is cast without having been wished for."""
        cast = report.dtype_mismatched
        if cast and self._policy == "warn":
            first = cast[0]
            others = f" and {len(cast) - 1} other tensors" if cast[1:] else ""
            warn_caller(
                f"{first.name!r}{others} are cast on loading ({first.got} in the checkpoint, {first.expected} in the state dict); "
                "say dtype_policy='cast', or dtype=..., if that is meant"
            )
