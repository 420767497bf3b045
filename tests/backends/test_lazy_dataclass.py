"""A dataclass whose methods are made late is the one of the standard library in everything that is used of it."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import weakref
from dataclasses import field
from typing import Any, ClassVar, Generic, TypeVar

import pytest

from backends import lazy_dataclass

T = TypeVar("T")


def classes(make: Any) -> dict[str, type]:
    """Every kind of class that is used here, made by ``make``."""

    @make(frozen=True, slots=True, order=True)
    class Point:
        x: int
        y: int = 2

    @make(frozen=True, slots=True, order=True)
    class Named(Point):
        name: str = field(default="", compare=False)

    @make(frozen=True, kw_only=True)
    class Options(Generic[T]):
        """Has a docstring."""

        kind: ClassVar[str] = "plain"
        one: int
        many: list[int] = field(default_factory=list, repr=False)

    @make(frozen=True, kw_only=True)
    class More(Options[int]):
        two: str = "2"

        def __post_init__(self) -> None:
            if self.two == "bad":
                raise ValueError(self.two)

    @make(slots=True)
    class Changing:
        values: dict[str, int] = field(default_factory=dict)
        count: int = 0

    @make(slots=True, eq=False, weakref_slot=True)
    class Itself:
        value: int

        def __repr__(self) -> str:
            return "itself"

    @make
    class Bare:
        value: float

    return {
        one.__name__: one for one in (Point, Named, Options, More, Changing, Itself, Bare)
    }  # fmt: skip


CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("Point", (1,), {}),
    ("Point", (1,), {"y": 3}),
    ("Point", (), {}),
    ("Point", (1, 2, 3), {}),
    ("Point", (1,), {"z": 3}),
    ("Named", (1, 2, "three"), {}),
    ("Options", (), {"one": 1}),
    ("Options", (1,), {}),
    ("More", (), {"one": 1, "many": [5], "two": "x"}),
    ("More", (), {"one": 1, "two": "bad"}),
    ("Changing", (), {}),
    ("Changing", ({"a": 1},), {"count": 4}),
    ("Itself", (1,), {}),
    ("Bare", (float("nan"),), {}),
]


def outcome(act: Any) -> object:
    """What comes of it, or which kind of error."""
    try:
        return act()
    except Exception as error:  # noqa: BLE001 (any kind is compared)
        return type(error)


def facts(cls: type, args: tuple[Any, ...], how: dict[str, Any]) -> dict[str, object]:
    made = outcome(lambda: cls(*args, **how))
    if isinstance(made, type):
        return {"error": made}
    one: Any = made
    name = dataclasses.fields(one)[0].name
    other = copy.copy(one)
    return {
        "repr": repr(one).replace(" object at", "").split(" 0x")[0],
        "dict": repr(dataclasses.asdict(one)),
        "tuple": repr(dataclasses.astuple(one)),
        "fields": [(f.name, f.type, f.default, f.compare) for f in dataclasses.fields(cls)],
        "equal": one == other,
        "same type only": one == dataclasses.astuple(one),
        "hash": outcome(lambda: hash(one) == hash(other)),
        "less": outcome(lambda: one < other),
        "at most": outcome(lambda: one <= other),
        "replaced": outcome(
            lambda: repr(dataclasses.astuple(dataclasses.replace(one, **{name: 7})))
        ),
        "set": outcome(lambda: setattr(one, name, 9)),
        "deleted": outcome(lambda: delattr(copy.copy(one), name)),
        "weak": outcome(lambda: bool(weakref.ref(one))),
        "match": cls.__match_args__,  # type: ignore[attr-defined]
        "slots": "__dict__" in dir(one),
    }


@pytest.mark.parametrize(("name", "args", "how"), CALLS)
def test_it_does_what_the_standard_library_does(name, args, how):
    ours, theirs = classes(lazy_dataclass.dataclass)[name], classes(dataclasses.dataclass)[name]
    assert facts(ours, args, how) == facts(theirs, args, how)


def test_a_mutable_default_is_refused():
    with pytest.raises(ValueError, match="mutable default"):

        @lazy_dataclass.dataclass
        class _Bad:
            values: list[int] = []  # noqa: RUF012 (the point of it)


@lazy_dataclass.dataclass(frozen=True, slots=True)
class Pickled:
    value: int
    more: str = "m"


def test_a_frozen_one_with_slots_can_be_pickled():
    assert pickle.loads(pickle.dumps(Pickled(5))) == Pickled(5)


def test_a_method_is_made_once_and_when_it_is_wanted():
    cls = classes(lazy_dataclass.dataclass)["Point"]
    assert not callable(cls.__dict__["__init__"])
    cls(1)
    made = cls.__dict__["__init__"]
    cls(2)
    assert callable(made)
    assert cls.__dict__["__init__"] is made
    assert not callable(cls.__dict__["__eq__"])


def test_one_of_the_standard_library_may_be_made_of_one():
    @dataclasses.dataclass(frozen=True, slots=True)
    class More(Pickled):
        third: int = 3

    assert dataclasses.astuple(More(1)) == (1, "m", 3)
