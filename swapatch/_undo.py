"""The only place that sets or deletes attributes of objects that are not ours, and that puts them back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ._errors import PatchConflictError, explain

logger = logging.getLogger("swapatch")


class Missing:
    """Stands for an attribute that the object did not have. Used as a class, which every deep copy leaves the same."""


@dataclass
class _Slot:
    label: str
    owner: Any
    name: str
    before: Any
    ours: Any

    def taken_by(self) -> Any:
        """What sits in the slot in the place of ours, or Missing."""
        now = vars(self.owner).get(self.name, Missing)
        return Missing if now is self.ours else now

    def restore(self) -> None:
        if self.before is not Missing:
            setattr(self.owner, self.name, self.before)
        elif self.name in vars(self.owner):
            delattr(self.owner, self.name)


@dataclass
class UndoLog:
    """What was changed, in order. Lives on the model it is about, so that a deep copy carries a log of its own."""

    slots: list[_Slot] = field(default_factory=list)
    hooks: list[RemovableHandle] = field(default_factory=list)

    def set(self, label: str, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` and remember what the object itself had there (not what its class has)."""
        before = vars(owner).get(name, Missing)
        setattr(owner, name, value)
        self.slots.append(_Slot(label, owner, name, before, value))
        logger.debug("replaced: %s", label)

    def hook_before(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Register a hook that runs before the module's forward and may change its arguments."""
        self.hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def hook_after(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Register a hook that runs after the module's forward."""
        self.hooks.append(module.register_forward_hook(hook, with_kwargs=True))

    def irregular(self) -> list[str]:
        """The attributes that somebody has changed since."""
        return [slot.label for slot in self.slots if vars(slot.owner).get(slot.name, Missing) is not slot.ours]

    def undo(self) -> None:
        """Put everything back, last change first. Calling it again does nothing.

        Raises:
            PatchConflictError: when somebody else sits on one of our attributes; nothing is changed then.
        """
        for slot in self.slots:
            if (intruder := slot.taken_by()) is not Missing:
                raise PatchConflictError(
                    explain(
                        f"{slot.label} is {_describe(intruder)} by now",
                        "undoing while the replacement is still in place",
                        "take that wrapper off first, then undo again",
                    )
                )
        while self.hooks:
            self.hooks.pop().remove()
        while self.slots:
            self.slots.pop().restore()


def _describe(thing: Any) -> str:
    inner = getattr(thing, "func", thing)
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    return f"{name} of {getattr(inner, '__module__', None) or type(inner).__module__}"
