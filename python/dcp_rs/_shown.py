"""How objects of this package show themselves: a line as text, a table in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

__all__ = ["Report", "call", "size", "table"]

#: Names, and rows, that stand for all of a longer list.
_NAMED, _ROWS = 2, 100
#: Entries of an option that are all shown.
_LISTED = 8


class Report:
    """Base of all reports, which are dataclasses. Lists of names are shown by their lengths and first names."""

    #: The field that counts the bytes of which ``seconds`` tells the time.
    _timed = ""

    @property
    def gb_per_second(self) -> float | None:
        """Gigabytes (10^9 bytes) a second; None if nothing was timed."""
        seconds = getattr(self, "seconds", 0.0)
        nbytes = getattr(self, self._timed, 0) if self._timed else 0
        return nbytes / seconds / 1e9 if seconds and nbytes else None

    def to_dict(self) -> dict[str, Any]:
        """Convert the report to plain types, for ``json.dumps``.

        Returns:
            The fields by name, and ``gb_per_second`` where time was measured.

        Example:
            ```python
            report = dcp_rs.verify("ckpt")
            assert report.to_dict()["entries"] == report.entries
            ```
        """
        found: dict[str, Any] = _plain(self)
        speed = self.gb_per_second
        return found if speed is None else found | {"gb_per_second": speed}

    def __repr__(self) -> str:
        parts = [f"{name}={text}" for name, text in _facts(self)]
        return f"{type(self).__name__}({', '.join(parts)})"

    def _repr_html_(self) -> str:
        return table([type(self).__name__, ""], _facts(self))


def _facts(report: Any) -> list[tuple[str, str]]:
    """What is in the fields that are not empty."""
    found = [(known.name, getattr(report, known.name)) for known in fields(report)]
    found.append(("gb_per_second", report.gb_per_second))
    return [
        (name, _short(name, value)) for name, value in found if value not in (None, 0, "", [], {})
    ]


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {known.name: _plain(getattr(value, known.name)) for known in fields(value)}
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, str) else str(key): _plain(each) for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _short(name: str, value: Any) -> str:
    if isinstance(value, list | tuple | Mapping):
        first = [
            repr(entry) if isinstance(entry, str) else str(entry) for entry in list(value)[:_NAMED]
        ]
        more = f" and {len(value) - _NAMED:,} more" if len(value) > _NAMED else ""
        return f"<{len(value):,}: {', '.join(first)}{more}>"
    if name.startswith("bytes"):
        return size(value)
    return f"{value:.3g}" if isinstance(value, float) else repr(value)


def call(name: str, given: Mapping[str, Any]) -> str:
    """As it was made: ``name(option=value, ...)``, without what is None."""
    parts = [f"{option}={_brief(value)}" for option, value in given.items() if value is not None]
    return f"{name}({', '.join(parts)})"


def _brief(value: Any) -> str:
    """Return the value's text; of a long mapping or collection its first entries and how many more there are."""
    if not isinstance(value, Mapping | list | tuple | set | frozenset) or len(value) <= _LISTED:
        return repr(value)
    first = list(value)[:_NAMED]
    shown = (
        [f"{one!r}: {value[one]!r}" for one in first]
        if isinstance(value, Mapping)
        else map(repr, first)
    )
    return f"<{type(value).__name__} of {len(value):,}: {', '.join(shown)}, ...>"


def size(nbytes: float) -> str:
    """Bytes, to three digits (powers of 1000)."""
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        nbytes /= 1000
        if nbytes < 999.5 or unit == "TB":
            break
    digits = 2 if nbytes < 9.995 else 1 if nbytes < 99.95 else 0
    return f"{nbytes:.{digits}f} {unit}"


def table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, total: int | None = None
) -> str:
    """HTML; of many rows the first, and how many more there are of ``total``."""
    import html  # a list of all entities comes with it

    shown = [row for _, row in zip(range(_ROWS), rows, strict=False)]
    head = "".join(
        f"<th style='text-align:left'>{html.escape(heading)}</th>" for heading in headings
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in row)
        + "</tr>"
        for row in shown
    )
    rest = (
        f"<p>and {total - len(shown):,} more</p>"
        if total is not None and total > len(shown)
        else ""
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}"
