"""Unknown keyword arguments: the error names the option that is meant."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from inspect import Parameter, signature
from typing import Any, ParamSpec, TypeVar

__all__ = ["check_arguments", "suggest_option"]

P = ParamSpec("P")
R = TypeVar("R")

#: Options of other libraries, by function, and their equivalents here.
_EQUIVALENTS = {
    "load": {
        "strict": "allow_partial_load=True does what strict=False does elsewhere",
        "map_location": "use device=",
        "storage_reader": "pass the path as path=; dcp_rs.load_state_dict() takes a reader",
    },
    "save": {"storage_writer": "pass the path as path=; torch's dcp.save() takes a writer"},
    "open": {"map_location": "use device="},
    "CheckpointManager": {
        "overwrite": "save(step, state_dict, force=True) replaces a step",
        "save_id": "each step gets a new one",
        "parent": "reuse= takes unchanged tensors from the step before",
    },
}
_EQUIVALENTS["async_save"] = _EQUIVALENTS["save"]
for _name in ("load_training_state", "load_optim_state_dict"):
    _EQUIVALENTS[_name] = {
        "allow_partial_load": "use partial=True",
        "strict": "partial=True does what strict=False does elsewhere",
        "planner": "it takes the options of RsLoadPlanner itself",
    }


def suggest_option(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function, so that a call with an unknown option names the right one."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            # Without a second frame, the call itself failed: its arguments do not fit.
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                check_arguments(function, kwargs)
            raise

    return call


def check_arguments(
    function: Callable[..., Any], passed: Iterable[str], *others: Callable[..., Any]
) -> None:
    """Check that a function takes all of the keyword arguments.

    Args:
        function: the function that the caller called.
        passed: the names of the arguments.
        others: functions that get what it does not take itself.

    Raises:
        TypeError: the function does not take one. The message suggests another.
    """
    kinds = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    known = [
        name
        for one in (function, *others)
        for name, parameter in signature(one).parameters.items()
        if parameter.kind in kinds and not name.startswith("_") and name != "self"
    ]
    unknown = next((name for name in passed if name not in known), None)
    if unknown is None:
        return
    is_class = function.__name__ == "__init__"
    called = function.__qualname__.removesuffix(".__init__")
    hint = _EQUIVALENTS.get(called, {}).get(unknown)
    import difflib  # slow to import, for mistakes only

    near = difflib.get_close_matches(unknown, known, n=1)
    if hint is None and near:
        hint = f"did you mean {near[0]!r}?"
    module = "dcp_rs.optim" if function.__module__ == "dcp_rs.optim" else "dcp_rs"
    shown = called if is_class or "." in called else f"{module}.{called}"
    msg = f"{shown}{'' if is_class else '()'} has no option {unknown!r}"
    raise TypeError(msg if hint is None else f"{msg}: {hint}") from None
