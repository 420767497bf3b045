"""What is said of a store's troubles, and when; and that a refusal may be tried again only by one who follows."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from support.synthetic import SyntheticStore

from backends.errors import (
    AlreadyExistsError,
    BackendError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StoreFullError,
    UnavailableError,
    UnknownOutcomeError,
    UnreachableError,
    UntrustedError,
)
from backends.memory import MemoryStore
from backends.wrapping import MeteredStore, WrappingStore
from tiered.api.broker_place import Place
from tiered.api.stores import REASONS, PatientStore, RefusedForNowError
from tiered.attach.observe import is_well
from tiered.attach.writer import Attachment, AttachSettings
from tiered.clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Buffer

    from backends.base import ObjectInfo, Version


class Failing(WrappingStore):
    """Puts and listings fail with ``error`` while there is one."""

    error: BackendError | None = None

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        if self.error:
            raise self.error
        super().put_if_absent(key, data)

    def compare_and_set(self, key: str, data: bytes, expected: Version | None) -> Version:
        if self.error:
            raise self.error
        return super().compare_and_set(key, data, expected)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        if self.error:
            raise self.error
        yield from super().list(prefix, start_after=start_after)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def failing() -> Failing:
    return Failing(MemoryStore())


@pytest.fixture
def patient(failing: Failing, clock: ManualClock) -> PatientStore:
    return PatientStore(failing, clock)


def put(patient: PatientStore, key: str = "k", data: bytes = b"x") -> BackendError | None:
    try:
        patient.put_if_absent(key, data)
    except BackendError as error:
        return error
    return None


@pytest.mark.parametrize("kind", [PermissionDeniedError, UntrustedError])
def test_a_refusal_may_be_tried_again_only_while_following(
    kind: type[BackendError], patient: PatientStore, failing: Failing
):
    failing.error = kind("no")
    assert put(patient) is failing.error
    patient.wait_out_refusals()
    met = put(patient)
    assert isinstance(met, RefusedForNowError)
    assert (met.retriable, str(met)) == (True, "no")
    with pytest.raises(RefusedForNowError):
        list(patient.list(""))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PermissionDeniedError("e"), "permission"),
        (UntrustedError("e"), "trust"),
        (StoreFullError("e"), "full"),
        (UnreachableError("e"), "unreachable"),
        (UnavailableError("e"), "failing"),
        (UnknownOutcomeError("e"), "failing"),
    ],
)
def test_how_long_a_trouble_has_lasted(
    *, error: BackendError, reason: str, patient: PatientStore, failing: Failing, clock: ManualClock
):
    failing.error = error
    put(patient)
    clock.advance(5)
    put(patient)
    clock.advance(2)
    assert patient.seconds_waiting() == {**dict.fromkeys(REASONS, 0.0), reason: 7.0}
    failing.error = None
    list(patient.list(""))  # another kind of request tells nothing of puts
    assert patient.seconds_waiting()[reason] == 7.0
    put(patient)
    assert not any(patient.seconds_waiting().values())


@pytest.mark.parametrize("error", [AlreadyExistsError("e"), ObjectNotFoundError("e")])
def test_an_answer_like_any_other_is_no_trouble_and_ends_one(
    error: BackendError, patient: PatientStore, failing: Failing
):
    failing.error = StoreFullError("e")
    put(patient)
    failing.error = error
    assert put(patient) is error
    assert patient.troubles() == []


def test_what_is_said_at_once_and_what_only_when_it_lasts(
    patient: PatientStore, failing: Failing, clock: ManualClock, caplog: pytest.LogCaptureFixture
):
    for error, seconds in ((StoreFullError("no room"), 0), (UnreachableError("nobody"), 10)):
        caplog.clear()
        failing.error = error
        for _ in range(9):
            put(patient)
            clock.advance(1)
        assert len(caplog.messages) == (seconds == 0)
        clock.advance(1)
        put(patient)
        assert len(caplog.messages) == 1
        clock.advance(59.5)
        put(patient)
        clock.advance(1)
        put(patient)
        assert len(caplog.messages) == 2, "once a minute"
        assert f": {error}; " in caplog.messages[-1]
        failing.error = None
        put(patient, str(seconds))
        assert "takes put requests again, after 7" in caplog.messages[-1]


def test_a_trouble_that_passes_at_once_is_not_worth_a_word(
    patient: PatientStore, failing: Failing, caplog: pytest.LogCaptureFixture
):
    failing.error = UnavailableError("busy")
    put(patient)
    failing.error = None
    put(patient)
    assert caplog.messages == []


def test_a_store_is_full_until_it_takes_what_it_has_refused(
    patient: PatientStore, failing: Failing, clock: ManualClock, caplog: pytest.LogCaptureFixture
):
    """A nearly full store takes journal entries, and refuses parts."""
    for number in range(5):
        failing.error = StoreFullError("no room")
        put(patient, data=b"part")
        clock.advance(1)
        failing.error = None
        put(patient, f"small {number}", b"x")
        assert patient.seconds_waiting()["full"] == number + 1
    assert caplog.messages == ["waiting (full): no room; make room"]
    put(patient, "large", b"part")
    assert patient.troubles() == []
    assert caplog.messages[1:] == ["the store takes put requests again, after 5 s"]


def test_a_store_is_not_full_for_ever_when_nothing_as_large_is_put_again(
    patient: PatientStore, failing: Failing, clock: ManualClock
):
    failing.error = StoreFullError("no room")
    put(patient, data=b"part")
    failing.error = None
    clock.advance(60)
    put(patient)
    assert patient.troubles() == []


def test_that_a_store_is_full_is_said_once_for_parts_and_for_the_lease(
    patient: PatientStore, failing: Failing, caplog: pytest.LogCaptureFixture
):
    failing.error = StoreFullError("no room")
    put(patient)
    with pytest.raises(StoreFullError):
        patient.compare_and_set("lease", b"x", None)
    assert len(caplog.messages) == 1
    assert {one.kind for one in patient.troubles()} == {"put", "replace"}


def test_that_a_store_is_gone_is_said_once_a_minute_for_all_requests(
    patient: PatientStore, failing: Failing, clock: ManualClock, caplog: pytest.LogCaptureFixture
):
    for outage in (1, 2):
        failing.error = UnreachableError("nobody there")
        for _ in range(75):
            put(patient)
            with pytest.raises(UnreachableError):
                list(patient.list(""))
            clock.advance(1)
        assert len([one for one in caplog.messages if "nobody there" in one]) == 2 * outage
        failing.error = None
        assert put(patient, key=f"{outage}") is None
        list(patient.list(""))
        assert len([one for one in caplog.messages if "requests again" in one]) == outage


def test_that_a_store_is_full_is_said_once_a_minute_however_often_it_has_room_for_something(
    patient: PatientStore, failing: Failing, clock: ManualClock, caplog: pytest.LogCaptureFixture
):
    """At the border of full a part goes in, and the next one does not."""
    for number in range(7):
        failing.error = StoreFullError("no room")
        put(patient, data=b"part")
        assert patient.seconds_waiting().keys() >= {"full"}
        assert [one.reason for one in patient.troubles()] == ["full"]
        failing.error = None
        clock.advance(10)
        put(patient, f"large {number}", b"part")
        assert patient.troubles() == []
    full = "waiting (full): no room; make room"
    again = "the store takes put requests again, after 10 s"
    assert caplog.messages == [full, again, full, again]


def test_health_names_each_reason_once(failing: Failing, patient: PatientStore):
    stalled = SimpleNamespace(is_stalled=True, seconds_without_commit=lambda: 30.0)
    attachment: Any = SimpleNamespace(fault=None, dispatcher=stalled, patient=patient)
    failing.error = UnreachableError("cannot reach http://s3:9000")
    put(patient)
    with pytest.raises(UnreachableError):
        list(patient.list(""))
    assert len(patient.troubles()) == 2
    assert is_well(attachment) == (
        "nothing could be committed for 30 s (unreachable: cannot reach http://s3:9000; see whether it runs)"
    )


def test_an_outage_of_the_lease_is_told_at_its_begin_each_minute_and_at_its_end(
    failing: Failing, clock: ManualClock, caplog: pytest.LogCaptureFixture
):
    """Ten minutes, in which a renewal fails every five to fifteen seconds."""
    attachment = Attachment(
        local=SyntheticStore(),
        meter=MeteredStore(failing),
        place=Place("c", "b"),
        settings=AttachSettings(lease_s=15.0),
        clock=clock,
        rng=random.Random(1),
        announce=lambda _state: None,
    )
    lease = attachment._lease
    lease.acquire(wait=False, announce=lambda _state: None, stop=lambda _s: False)
    failing.error, failed = UnavailableError("e"), 0
    renew = lease.renew

    def renewed() -> None:
        nonlocal failed
        if clock.monotonic_s() > 600:
            failing.error = None
        try:
            renew()
        except BackendError:
            failed += 1
            raise
        if clock.monotonic_s() > 700:
            attachment._abandon.set()

    lease.renew = renewed  # type: ignore[method-assign]
    attachment._renew()
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert failed > 20
    assert sum("could not be renewed" in line for line in told) == 1
    assert sum("waiting for" in line for line in told) in range(8, 12)
    assert told[-1:] == [
        f"the lease is renewed again, after {failed} failed tries",
    ], told
