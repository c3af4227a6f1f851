"""Links on the site for names in docstrings, which are written as Sphinx does (``:class:`X` ``).

Signatures leave out ``_names``, which are not for callers, and name the keys of a ``TypedDict`` in
place of ``**options: Unpack[...]``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Name the options of each function."""
        for func in _functions(pkg):
            *known, last = func.parameters or [None]
            name = str(last and last.annotation)
            if name.startswith("Unpack["):
                arguments = pkg.modules_collection[func.module.resolve(name[len("Unpack[") : -1])]
                options = (
                    griffe.Parameter(
                        key.name,
                        annotation=key.annotation,
                        kind=griffe.ParameterKind.keyword_only,
                        default="...",
                    )
                    for key in arguments.attributes.values()  # with those of its bases
                )
                func.parameters = griffe.Parameters(*known, *options)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            text = ROLE.sub(lambda match: _reference(obj, match[1]), obj.docstring.value)
            obj.docstring.value = BLOCK.sub("", text)


def _functions(of: griffe.Object) -> Iterator[griffe.Function]:
    """Yield the functions, methods and overloads of a module or class."""
    for member in of.members.values():
        if isinstance(member, griffe.Function):
            yield from [member, *(member.overloads or ())]
        elif isinstance(member, griffe.Module | griffe.Class):
            yield from _functions(member)


def _reference(obj: griffe.Object, name: str) -> str:
    if name.startswith("dcp_rs."):
        return f"[`{name}`][{name}]"
    try:
        found = obj.resolve(name)
    except griffe.NameResolutionError:
        return f"`{name}`"
    return f"[`{name}`][{found}]" if found.startswith("dcp_rs.") else f"`{name}`"
