"""Hooks that users registered for the steps of all optimizers: they are not meant for one that only stands for another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

__all__ = ["unheard"]

Hook = Callable[[Optimizer, Any, Any], Any]


def _registered(register: Callable[[Hook], Any]) -> MutableMapping[int, Hook]:
    """Where torch keeps them, as a handle tells."""
    handle = register(lambda *_: None)
    hooks: MutableMapping[int, Hook] = handle.hooks_dict_ref()
    handle.remove()
    return hooks


_HOOKS = (_registered(register_optimizer_step_pre_hook), _registered(register_optimizer_step_post_hook))
#: One at a time, as each puts back what it found. A hook that loads comes here again.
_TURN = threading.RLock()


@contextmanager
def unheard(optimizer: Optimizer) -> Iterator[None]:
    """No hook is called for steps of ``optimizer``. Steps of others, in other threads, have theirs as ever."""
    with _TURN:
        replaced = [(hooks, key, hook, _but_for(optimizer, hook)) for hooks in _HOOKS for key, hook in [*hooks.items()]]
        for hooks, key, _, instead in replaced:
            hooks[key] = instead
        try:
            yield
        finally:
            for hooks, key, hook, instead in replaced:
                if hooks.get(key) is instead:  # else its handle removed it meanwhile
                    hooks[key] = hook


def _but_for(optimizer: Optimizer, hook: Hook) -> Hook:
    def called(other: Optimizer, args: Any, kwargs: Any) -> Any:
        return None if other is optimizer else hook(other, args, kwargs)

    return called
