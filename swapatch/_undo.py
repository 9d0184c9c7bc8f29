"""The only place that sets or deletes attributes of objects that are not ours, and that puts them back."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from ._errors import PatchConflictError, explain
from .compiled import COMPILED

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

    @property
    def place(self) -> str:
        """The attribute that holds ours: a hook of accelerate gives a forward another name while it is there."""
        return next((name for name, value in vars(self.owner).items() if value is self.ours), self.name)

    def now(self) -> Any:
        """What is there now, or Missing."""
        return vars(self.owner).get(self.place, Missing)

    def restore(self) -> None:
        place = self.place
        if self.before is not Missing:
            setattr(self.owner, place, self.before)
        elif place != self.name:  # under a hook that came since, which calls what it finds there
            setattr(self.owner, place, getattr(type(self.owner), self.name).__get__(self.owner))
        elif place in vars(self.owner):
            delattr(self.owner, place)

    def __reduce__(self) -> tuple[Any, ...]:
        bound = type(self.ours) is MethodType  # isinstance is true of wrapt's wrappers too
        ours = self.ours.__func__ if bound else self.ours
        lost = self.now() is self.ours and (bound or self.name == COMPILED)
        return _load_slot, (self.label, self.owner, self.place, self.before, ours, bound, lost)


def _load_slot(label: str, owner: Any, name: str, before: Any, ours: Any, bound: bool, lost: bool) -> _Slot:
    """A slot of a loaded model.

    A bound method is its name alone in a pickle, so ours came back as the class has it; what is compiled a module
    leaves out of its copies.
    """
    ours = MethodType(ours, owner) if bound else ours
    if lost:
        setattr(owner, name, ours)
    return _Slot(label, owner, name, before, ours)


@dataclass
class UndoLog:
    """What was changed, in order. Lives on the model it is about, so that a deep copy carries a log of its own."""

    slots: list[_Slot] = field(default_factory=list)

    def set(self, label: str, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` and remember what the object itself had there (not what its class has)."""
        before = vars(owner).get(name, Missing)
        self.slots.append(_Slot(label, owner, name, before, value))  # first: an interrupt may come in between
        setattr(owner, name, value)
        logger.debug("replaced: %s", label)

    def irregular(self) -> list[str]:
        """The attributes that somebody has changed since."""
        return [slot.label for slot in self.slots if slot.now() is not slot.ours]

    def undo(self) -> None:
        """Put everything back, last change first. Calling it again does nothing.

        Raises:
            PatchConflictError: when somebody else sits on one of our attributes; nothing is changed then.
        """
        for slot in self.slots:
            intruder = slot.now()
            if not any(intruder is known for known in (slot.ours, slot.before, Missing)):
                raise PatchConflictError(
                    explain(
                        f"{slot.label} is {_describe(intruder)} by now",
                        "undoing while the replacement is still in place",
                        "take that wrapper off first, then undo again",
                    )
                )
        while self.slots:  # struck off once it is done, so that an undo that was interrupted can be called again
            self.slots[-1].restore()
            self.slots.pop()


def _describe(thing: Any) -> str:
    inner = getattr(thing, "func", thing)
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    return f"{name} of {getattr(inner, '__module__', None) or type(inner).__module__}"
