"""``dataclass`` as of the standard library, but its methods are made when they are first wanted.

The one of the standard library compiles six to ten functions for each class as the class is defined. A command defines 150
of them and uses the ``__init__`` of half, ``__eq__`` of a few, and ``__repr__`` of none: that took a quarter of what a start
costs. Here a class gets placeholders, and the first use of one puts the function in its place: every later use is as quick
as with the standard library. To a type checker it is the ``dataclass`` of the standard library; its ``field``, ``fields``,
``replace``, ``asdict`` and ``astuple`` work as they do there.

What it can do is what is used here: no ``InitVar``, ``KW_ONLY``, ``init=False`` or ``unsafe_hash``. Whether fields with
defaults stand behind those without is the type checker's business.

Threads: two that want the same function first both make it, and it is the same.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final, TypeVar

__all__ = ["dataclass", "picked"]

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from dataclasses import dataclass

T = TypeVar("T")
Fields = dict[str, dataclasses.Field[Any]]

_FIELDS: Final = "__lazy_dataclass_fields__"
"""Attribute of a class: its fields by name, also those of its bases."""
_OF_THE_LIBRARY: Final = ("__dataclass_fields__", "__dataclass_params__")
"""What the standard library looks for in a dataclass, and in the bases of one of its own."""
_FACTORY_WANTED: Final = object()
"""Default of a parameter whose value a factory makes."""
_ORDER: Final = {"__lt__": "<", "__le__": "<=", "__gt__": ">", "__ge__": ">="}


def _source_of_init(fields: Fields, *, is_frozen: bool, has_more: bool) -> str:
    """Source of ``__init__``; of a frozen class it sets fields by the way that ``__setattr__`` bars."""
    parameters = {True: ["*"], False: ["self"]}
    lines = []
    for name, field in fields.items():
        value, default = name, ""
        if field.default_factory is not dataclasses.MISSING:
            value, default = f"make_{name}() if {name} is wanted else {name}", "=wanted"
        elif field.default is not dataclasses.MISSING:
            default = f"=default_{name}"
        parameters[bool(field.kw_only)].append(name + default)
        lines.append(f"set_(self, {name!r}, {value})" if is_frozen else f"self.{name} = {value}")
    if has_more:
        lines.append("self.__post_init__()")
    every = parameters[False] + (parameters[True] if len(parameters[True]) > 1 else [])
    return f"def __init__({', '.join(every)}):\n " + "\n ".join(lines or ["pass"])


def _tuple_of(owner: str, names: list[str]) -> str:
    return "(" + "".join(f"{owner}.{name}," for name in names) + ")"


def _source(name: str, fields: Fields, *, is_frozen: bool, has_more: bool) -> str:
    """Source of the method of this name."""
    if name == "__init__":
        return _source_of_init(fields, is_frozen=is_frozen, has_more=has_more)
    if name == "__repr__":
        shown = ", ".join(f"{key}={{self.{key}!r}}" for key, field in fields.items() if field.repr)
        return f"def __repr__(self):\n return f'{{type(self).__qualname__}}({shown})'"
    compared = [key for key, field in fields.items() if field.compare]
    mine, others = _tuple_of("self", compared), _tuple_of("other", compared)
    if name == "__hash__":
        return f"def __hash__(self):\n return hash({mine})"
    return (
        f"def {name}(self, other):\n"
        f" if other.__class__ is not self.__class__: return NotImplemented\n"
        f" return {mine} {_ORDER.get(name, '==')} {others}"
    )


class _Later:
    """Stands in a class for a method of it until that is first wanted."""

    __slots__ = ("cls", "is_frozen", "name")

    def __init__(self, cls: type, name: str, *, is_frozen: bool) -> None:
        self.cls, self.name, self.is_frozen = cls, name, is_frozen

    def __get__(self, instance: object, owner: type) -> Any:  # noqa: ANN401 (a function, or bound to an instance)
        made = self._made()
        setattr(self.cls, self.name, made)
        return made.__get__(instance, owner) if callable(made) else made

    def _made(self) -> Any:  # noqa: ANN401
        cls = self.cls
        fields: Fields = getattr(cls, _FIELDS)
        if self.name in _OF_THE_LIBRARY:
            named = [(name, field.type, field) for name, field in fields.items()]
            how: Any = {"init": False, "repr": False, "eq": False, "frozen": self.is_frozen}
            return getattr(dataclasses.make_dataclass("twin", named, **how), self.name)
        has_more = hasattr(cls, "__post_init__")
        source = _source(self.name, fields, is_frozen=self.is_frozen, has_more=has_more)
        scope: dict[str, Any] = {"set_": object.__setattr__, "wanted": _FACTORY_WANTED}
        for name, field in fields.items():
            scope[f"default_{name}"], scope[f"make_{name}"] = field.default, field.default_factory
        exec(source, scope)  # noqa: S102 (made of names of fields, as the standard library does it)
        method = scope[self.name]
        method.__module__, method.__qualname__ = cls.__module__, f"{cls.__qualname__}.{self.name}"
        return method


def _refuse_set(_self: object, name: str, _value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_delete(_self: object, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: object) -> list[Any]:
    """What a copy or a pickle of a frozen one with slots holds."""
    return [getattr(self, name) for name in getattr(type(self), _FIELDS)]


def _set_state(self: object, state: list[Any]) -> None:
    for name, value in zip(getattr(type(self), _FIELDS), state, strict=True):
        object.__setattr__(self, name, value)


_FROZEN: Final[Mapping[str, Callable[..., object]]] = {
    "__setattr__": _refuse_set,
    "__delattr__": _refuse_delete,
}
_FROZEN_SLOTS: Final[Mapping[str, Callable[..., object]]] = {
    "__getstate__": _state,
    "__setstate__": _set_state,
}


def _own_fields(cls: type, *, kw_only: bool) -> Fields:
    """Those that the class itself annotates; of their defaults none stays with the class but plain values."""
    found: Fields = {}
    for name, annotation in cls.__annotations__.items():
        if "ClassVar" in str(annotation):
            continue
        default = cls.__dict__.get(name, dataclasses.MISSING)
        is_field = isinstance(default, dataclasses.Field)
        field: Any = default if is_field else dataclasses.field(default=default)
        if getattr(field.default, "__hash__", hash) is None:
            raise ValueError(f"mutable default of {cls.__name__}.{name}; use default_factory")
        field.name, field.type = name, annotation
        field.kw_only = kw_only if field.kw_only is dataclasses.MISSING else field.kw_only
        if is_field and field.default is dataclasses.MISSING:
            delattr(cls, name)
        elif is_field:
            setattr(cls, name, field.default)
        found[name] = field
    return found


def _with_slots(cls: type, names: list[str], *, weakref_slot: bool) -> type:
    """The class anew: Python wants to know of slots as a class is made."""
    members = {name: value for name, value in cls.__dict__.items() if name not in names}
    members.pop("__dict__", None)
    members.pop("__weakref__", None)
    members["__slots__"] = (*names, "__weakref__") if weakref_slot else tuple(names)
    made = type(cls)(cls.__name__, cls.__bases__, members)
    made.__qualname__ = cls.__qualname__
    return made


def _process(
    cls: type[T],
    *,
    frozen: bool = False,
    slots: bool = False,
    kw_only: bool = False,
    eq: bool = True,
    order: bool = False,
    weakref_slot: bool = False,
) -> type[T]:
    inherited: Fields = {}
    for base in cls.__mro__[-1:0:-1]:
        inherited |= base.__dict__.get(_FIELDS, {})
    own = _own_fields(cls, kw_only=kw_only)
    if slots:
        names = [name for name in own if name not in inherited]
        cls = _with_slots(cls, names, weakref_slot=weakref_slot)
    fields = inherited | own
    setattr(cls, _FIELDS, fields)
    given = cls.__dict__
    later = ["__init__", "__repr__", *_OF_THE_LIBRARY]
    if eq:
        later.append("__eq__")
        if frozen and given.get("__hash__") is None:
            later.append("__hash__")
        elif "__hash__" not in given:
            cls.__hash__ = None  # type: ignore[assignment]
    later += _ORDER if order else ()
    for name in later:
        if given.get(name) is None:
            setattr(cls, name, _Later(cls, name, is_frozen=frozen))
    for name, method in (_FROZEN if frozen else {}).items():
        setattr(cls, name, method)
    for name, method in (_FROZEN_SLOTS if frozen and slots else {}).items():
        setattr(cls, name, method)
    positional = [name for name, field in fields.items() if not field.kw_only]
    setattr(cls, "__match_args__", tuple(positional))  # noqa: B010 (mypy knows it as final)
    return cls


if not TYPE_CHECKING:

    def dataclass(cls: type | None = None, /, **how: bool) -> Any:  # noqa: ANN401
        """Makes a dataclass of a class; see ``dataclasses.dataclass``."""
        return _process(cls, **how) if cls is not None else lambda cls: _process(cls, **how)


def picked(source: object, *names: str) -> dict[str, Any]:
    """What an object has under these names, for a document."""
    return {name: getattr(source, name) for name in names}
