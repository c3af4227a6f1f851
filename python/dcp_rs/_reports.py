"""Base of all reports, and short texts for objects and sizes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import is_dataclass
from typing import Any

#: Number of names that a report shows of a long list.
_NAMED = 2
#: Number of characters of a ``repr``.
_MAX_REPR = 200


class Report:
    """Base of all reports, which are dataclasses. A list of names is shown by its first names."""

    def to_dict(self) -> dict[str, Any]:
        """Convert the report to plain types, for ``json.dumps``.

        Returns:
            The fields by name.

        Example:
            ```python
            report = dcp_rs.verify("ckpt")
            assert report.to_dict()["entries"] == report.entries
            ```
        """
        found: dict[str, Any] = _plain(self)
        return found

    def __repr__(self) -> str:
        shown = [
            f"{name}={_short(name, value)}"
            for name, value in vars(self).items()
            if value not in (None, 0, "", [], {})
        ]
        return short_repr(self, *shown)


def short_repr(owner: object, *shown: str, **options: Any) -> str:
    """Return the class of an object with some texts and options, in at most 200 characters."""
    shown += tuple(
        f"{name}={getattr(v, '__qualname__', None) or repr(v)}" for name, v in options.items()
    )
    text = f"{type(owner).__name__}({', '.join(shown)})"
    return text if len(text) <= _MAX_REPR else f"{text[: _MAX_REPR - 4]}...)"


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return _plain(vars(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _short(name: str, value: Any) -> str:
    if isinstance(value, Collection) and not isinstance(value, str):
        return _listed(value)
    if name.startswith("bytes"):
        return size(value)
    return f"{value:.3g}" if isinstance(value, float) else repr(value)


def _listed(values: Collection[Any]) -> str:
    """Return the number of values, and the first of them."""
    first = [repr(one) if isinstance(one, str) else str(one) for one in list(values)[:_NAMED]]
    more = f" and {len(values) - _NAMED:,} more" if len(values) > _NAMED else ""
    return f"<{len(values):,}: {', '.join(first)}{more}>"


def size(nbytes: float) -> str:
    """Return a number of bytes as text, to three digits (powers of 1000)."""
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        nbytes /= 1000
        if nbytes < 999.5 or unit == "TB":
            break
    digits = 2 if nbytes < 9.995 else 1 if nbytes < 99.95 else 0
    return f"{nbytes:.{digits}f} {unit}"
