"""Wrong calls: the error names the option, the function or the attribute that is meant."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@cache
def foreign() -> dict[str, Sequence[str]]:
    """Return what to write in place of names of other libraries, as ``equivalents.txt`` has it."""
    text = Path(__file__).with_name("equivalents.txt").read_text(encoding="utf-8")
    rows = (line.split(": ", 1) for line in text.splitlines() if line and line[0] != "#")
    return {name: texts.split(" | ") for names, texts in rows for name in names.split(", ")}


def equivalent(name: str, known: Collection[str] = (), owner: str = "") -> str | None:
    """Return what to write in place of a name of another library, or None.

    Args:
        name: the name of an option, an attribute or the scheme of a URL.
        known: the names that there are.
        owner: the function or the class.
    """
    for text in foreign().get(f"{owner}.{name}") or foreign().get(name, ()):
        own = text.partition("=")[0]
        if own in known or not own.isidentifier():
            is_name = own.isidentifier() and text.rstrip("=") == own
            return f"use {text}" if is_name else text
    return None


def suggest(name: str, known: Collection[str], owner: str = "") -> str | None:
    """Return the equivalent of a name, or the nearest name that is known, or None.

    The arguments are those of :func:`equivalent`.
    """
    import difflib  # slow to import, for mistakes only

    # Names of other libraries that are only a little like one of ours mean something else.
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return equivalent(name, known, owner) or (f"did you mean {near[0]!r}?" if near else None)


def type_of(value: object) -> str:
    """Return the name of a value's type for a message, or that the value is a class itself."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def no_attribute(thing: object, name: str) -> AttributeError:
    """Return the error for an attribute that an object lacks. It names the one that is meant."""
    kind = type(thing).__name__
    known = [each for each in dir(thing) if each[0] != "_"]
    hint = None if name.startswith("_") else suggest(name, known, kind)
    return AttributeError(f"{kind} has no attribute {name!r}" + (f": {hint}" if hint else ""))


class _Omitted:
    """Default of an option that the docstring tells."""

    def __repr__(self) -> str:
        return "..."


def _named_options(function: Callable[..., Any]) -> Signature:
    """Return a signature with the keys of ``**options: Unpack[Arguments]`` as arguments.

    ``help`` and completion of a shell then show them, as editors do.
    """
    shown = signature(function)
    *known, last = shown.parameters.values() or [Parameter("_", Parameter.KEYWORD_ONLY)]
    if last.kind is not Parameter.VAR_KEYWORD:
        return shown
    arguments = function.__globals__[str(last.annotation)[len("Unpack[") : -1]]
    for name, option_type in arguments.__annotations__.items():
        annotation = option_type.__forward_arg__
        known.append(
            Parameter(name, Parameter.KEYWORD_ONLY, default=_Omitted(), annotation=annotation)
        )
    return shown.replace(parameters=known)


def suggest_option(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function, so that a call with an unknown option names the right one.

    A function with ``**options: Unpack[Arguments]`` passes them to :func:`check_arguments`, on all
    ranks if several take part.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            passed = tuple(kwargs)
            del args, kwargs  # tools show them with a traceback, and options of a store are secret
            # Without a second frame, the call itself failed: its arguments do not fit.
            is_call = error.__traceback__ is not None and error.__traceback__.tb_next is None
            if is_call and isinstance(error, TypeError):
                check_arguments(call, passed)
                for advice in foreign().get(f"{function.__qualname__}()", ()):
                    raise TypeError(f"{error}: {advice}") from None
            raise

    call.__signature__ = _named_options(function)  # type: ignore[attr-defined]
    return call


def check_arguments(function: Callable[..., Any], passed: Iterable[str]) -> None:
    """Check that a public function takes all of the keyword arguments.

    Args:
        function: the function that the caller called, with :func:`suggest_option`.
        passed: the names of the arguments.

    Raises:
        TypeError: the function does not take one. The message suggests another.
    """
    kinds = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    known = [
        name
        for name, parameter in signature(function).parameters.items()
        if parameter.kind in kinds and not name.startswith("_") and name != "self"
    ]
    unknown = next((name for name in passed if name not in known), None)
    if unknown is None:
        return
    is_class = function.__name__ == "__init__"
    called = function.__qualname__.removesuffix(".__init__")
    hint = suggest(unknown, known, called)
    msg = f"{called}{'' if is_class else '()'} has no option {unknown!r}"
    raise TypeError(msg if hint is None else f"{msg}: {hint}") from None


def choose_argument(name: str, value: Any, stock_name: str, stock_value: Any) -> Any:
    """Return the value of an option that torch gives another name.

    Raises:
        ValueError: both are given, and differ.
    """
    if value is not None and stock_value is not None and value != stock_value:
        msg = f"{stock_name}={stock_value!r} and {name}={value!r}: they are one option"
        raise ValueError(msg)
    return stock_value if value is None else value
