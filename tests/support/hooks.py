"""Ways in which a user's own code gets into a planner: each takes a body, and gives a planner whose method it is.

A body is called with what it stands before (what `super()` has), the planner that is behind it all,
and the arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner


def overridable(kind: type) -> frozenset[str]:
    """Return the methods of a class of torch's planners: those that DCP may call, and those that they call."""
    return frozenset(
        name
        for base in kind.__mro__[:-1]
        for name, value in vars(base).items()
        if inspect.isroutine(value) and not name.startswith("__")
    )


def in_a_subclass(
    base: type, name: str, body: Callable[..., Any], patch: Any, **options: Any
) -> Any:
    """As a method of a subclass."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return body(partial(getattr(base, name), self), self, *args, **kwargs)

    return type("Sub" + base.__name__, (base,), {name: method})(**options)


def on_the_object(
    base: type, name: str, body: Callable[..., Any], patch: Any, **options: Any
) -> Any:
    """Set on one planner."""
    planner = base(**options)
    setattr(planner, name, partial(body, getattr(planner, name), planner))
    return planner


def in_the_class(
    base: type, name: str, body: Callable[..., Any], patch: Any, **options: Any
) -> Any:
    """Patched in the class itself, for as long as ``patch`` lasts."""
    own = getattr(base, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return body(partial(own, self), self, *args, **kwargs)

    patch.setattr(base, name, method)
    return base(**options)


class _Forwarding:
    """What a wrapper that is a planner itself has for each of the protocol's methods."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


def _forward(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self.inner, name)(*args, **kwargs)


def _set_up_a_save(
    self: Any, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
) -> None:
    """In full, as torch looks at the parameters of this one."""
    self.inner.set_up_planner(state_dict, storage_meta, is_coordinator)


_LOAD = type(
    "_Load", (_Forwarding, LoadPlanner), {name: _forward(name) for name in overridable(LoadPlanner)}
)
_SAVE = type(
    "_Save",
    (_Forwarding, SavePlanner),
    {name: _forward(name) for name in overridable(SavePlanner)}
    | {"set_up_planner": _set_up_a_save},
)


def _wrapped(
    base: type, name: str, body: Callable[..., Any], behind: Callable[[Any], Any]
) -> Callable[..., Any]:
    """The body as a method of a wrapper; ``behind`` finds what is wrapped."""
    if name == "set_up_planner" and issubclass(base, SavePlanner):

        def set_up(
            self: Any, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
        ) -> Any:
            own = behind(self)
            return body(own.set_up_planner, own, state_dict, storage_meta, is_coordinator)

        return set_up

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = behind(self)
        return body(getattr(own, name), own, *args, **kwargs)

    return method


def in_a_forwarding_wrapper(
    base: type, name: str, body: Callable[..., Any], patch: Any, **options: Any
) -> Any:
    """In a planner that implements the protocol, and forwards each method to another one."""
    kind = _LOAD if issubclass(base, LoadPlanner) else _SAVE
    return type("Wrapped" + base.__name__, (kind,), {name: _wrapped(base, name, body, inner)})(
        base(**options)
    )


class _Delegating:
    """A wrapper that hands over whatever it does not have."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def in_a_delegating_wrapper(
    base: type, name: str, body: Callable[..., Any], patch: Any, **options: Any
) -> Any:
    """In an object that has one method of its own, and all others of the planner behind it."""
    return type(
        "Delegating" + base.__name__, (_Delegating,), {name: _wrapped(base, name, body, inner)}
    )(base(**options))


WAYS = [
    in_a_subclass,
    on_the_object,
    in_the_class,
    in_a_forwarding_wrapper,
    in_a_delegating_wrapper,
]


def inner(planner: Any) -> Any:
    """The planner itself, or the one that it wraps."""
    return vars(planner).get("inner", planner)
