"""Links on the site for names in docstrings, which are written as Sphinx does (``:class:`X` ``).

Signatures leave out ``_names``, which are not for callers.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`~?([^`]+)`")

#: What announces a block of code, which Markdown knows by its indentation.
BLOCK = re.compile(r" ?::$", re.MULTILINE)


class Roles(griffe.Extension):
    """Turn roles into cross-references where the name is known, and into code where it is not."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Leave out arguments that are not for callers."""
        func.parameters = griffe.Parameters(
            *(parameter for parameter in func.parameters if not parameter.name.startswith("_"))
        )

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            text = ROLE.sub(lambda match: _reference(obj, match[1]), obj.docstring.value)
            obj.docstring.value = BLOCK.sub("", text)


def _reference(obj: griffe.Object, name: str) -> str:
    if name.startswith("dcp_rs."):
        return f"[`{name}`][{name}]"
    try:
        found = obj.resolve(name)
    except griffe.NameResolutionError:
        return f"`{name}`"
    return f"[`{name}`][{found}]" if found.startswith("dcp_rs.") else f"`{name}`"
