"""The remoting server: connections, frames, limits, and dispatch by the table of codes.

Overview
    One asyncio loop. Each connection cuts what it receives into frames; a request goes to the handler of its code. What
    handlers answer at once is gathered while the frames that came together are taken, and written together; a coroutine
    runs as a task, so that held requests are in nobody's way. Answers may overtake each other, as the protocol allows.

Limits
    Connections, requests under way on each, and bytes: large frames that are being received and answers that are not sent
    yet take of one budget for all, and answers of one of the connection's own besides, so that slow readers wait for
    themselves only; nothing is read from a client that takes no answers. Who says nothing for ``idle_s``, does not finish
    a frame within ``frame_s``, or takes nothing for ``send_s`` is disconnected. Of each connection up to ``BUFFER_BYTES``
    of a frame, and as much that waits to be sent, are not counted.

Errors
    A frame that is none ends its connection. A request that fails is answered with a code and a remark; a defect of ours is
    logged, and answered with ``SYSTEM_ERROR``. Requests under way die with their connection.

``close`` takes no more connections, waits for what is under way, and ends the rest. After a crash nothing is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from dataclasses import field, replace
from itertools import count
from typing import TYPE_CHECKING, Final, TypeAlias

from backends.lazy_dataclass import dataclass
from tiered.addresses import BACKLOG, Address, listening
from tiered.errors import TieredStoreError
from tiered.format.remoting import (
    ANSWER,
    SIZE_BYTES,
    Command,
    FrameError,
    decode,
    encode,
    frame_size,
)
from tiered.mount.protocol import BY_CODE, READ_ONLY, Code, RefusalError, Treatment

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Coroutine, Mapping

    from typing_extensions import Buffer

    from tiered.clock import Clock

_LOG = logging.getLogger("tiered.mount")
BUFFER_BYTES: Final = 64 * 1024
GATHER_BYTES: Final = 256 * 1024
"""So much of answers to frames that came together goes with one call: each gives the interpreter's lock away."""
LINGER_S: Final = 1.0
"""For what was written to go, at the end."""
OTHER: Final = -1
"""Stands for all codes that are not in the table; of answers, for those that are no ``Code``."""
_CODES: Final = frozenset(map(int, Code))
ASKED_MAX: Final = 64
"""Questions to one client at once."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What clients may take of this process."""

    connections_max: int = 4096  # at once; further ones are closed at once
    requests_max: int = 8192
    """Under way on one connection, held ones included; further ones are not read until one ends."""
    bytes_max: int = 256 * 1024 * 1024
    """Of frames being received and answers being sent, of all connections."""
    answer_bytes_max: int = 4 * 1024 * 1024  # of answers being sent on one connection
    idle_s: float = 120.0  # of a connection that says nothing
    frame_s: float = 30.0  # for the rest of a frame
    send_s: float = 60.0  # for an answer


class Budget:
    """Bytes that may be taken; who wants more than there are waits, in order. For one loop."""

    def __init__(self, bytes_max: int) -> None:
        """Nothing is taken."""
        self.bytes_max = bytes_max
        self.used_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size_bytes: int) -> None:
        """Take bytes; more than there are in all only when nobody has any."""
        if self.try_take(size_bytes):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            # The turn had come when it was cancelled: the bytes were taken for it already.
            if turn.done() and not turn.cancelled():
                self.give(size_bytes)
            raise

    def try_take(self, size_bytes: int) -> bool:
        """Take bytes if that needs no waiting; whether they were taken."""
        if self._waiting or not self._fits(size_bytes):
            return False
        self.used_bytes += size_bytes
        return True

    def give(self, size_bytes: int) -> None:
        """Give bytes back; below 0: take them without waiting, even if there are none left."""
        self.used_bytes -= size_bytes
        while self._waiting:
            wanted, turn = self._waiting[0]
            # Gave up while it waited; the next in line must not wait for it.
            if turn.cancelled():
                self._waiting.popleft()
            elif self._fits(wanted):
                self._waiting.popleft()
                self.used_bytes += wanted
                turn.set_result(None)
            else:
                break

    def _fits(self, size_bytes: int) -> bool:
        return not self.used_bytes or self.used_bytes + size_bytes <= self.bytes_max


@dataclass(slots=True)
class Counters:
    """What a server has done."""

    requests: Counter[int] = field(default_factory=Counter)  # by code, or ``OTHER``
    answers: Counter[int] = field(default_factory=Counter)  # by code of the answer, or ``OTHER``
    refused_connections: int = 0  # there were too many
    dropped: Counter[str] = field(default_factory=Counter)
    """Connections ended because of what the client did, by reason."""
    sent_bytes: int = 0  # of answers


class Connection(asyncio.Protocol):
    """A client's connection."""

    def __init__(self, server: RemotingServer) -> None:
        """Not connected yet."""
        self.peer = ""  # its address, for people
        self.answers = Budget(server.limits.answer_bytes_max)
        self.tasks: set[asyncio.Task[None]] = set()  # requests under way
        self.is_closed = True  # nothing goes over it any more
        self.heard_s = server.clock.monotonic_s()  # when something came last
        self.begun_s: float | None = None  # since when a frame is incomplete; None: none is
        # Since when it takes no more of what is written; None: it does.
        self.stuck_s: float | None = None
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._reserved_bytes = 0
        self._making_room: asyncio.Task[None] | None = None
        self._is_paused = False
        self._written_bytes = self._taken_bytes = 0
        self._is_gathering = False  # what is written waits for what else the same frames bring
        self._gathered: list[Buffer] = []
        self._gathered_bytes = 0
        self._answered: list[Exchange] = []  # whose answers are gathered; they keep their room
        self._drains: set[asyncio.Future[None]] = set()
        self._asked: dict[int, asyncio.Future[Command]] = {}
        self._opaque = count(1)

    # What the loop says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.peer = _address(transport.get_extra_info("peername"))
        if not self._server.welcome(self):
            transport.abort()
            return
        self.is_closed = False
        transport.set_write_buffer_limits(BUFFER_BYTES)

    def data_received(self, data: bytes) -> None:
        self.heard_s = self._server.clock.monotonic_s()
        self._buffer += data
        self._take_frames()

    def pause_writing(self) -> None:
        self.stuck_s = self._server.clock.monotonic_s()

    def resume_writing(self) -> None:
        self.stuck_s = None
        for drain in self._drains:
            if not drain.done():
                drain.set_result(None)
        self.go_on()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.is_closed:
            reason = "cut" if self._buffer else "network" if error else ""
            self._server.note_dropped(self, reason)
        # First: what the following wakes must not write any more.
        self.is_closed = True
        for drain in self._drains:
            if not drain.done():
                drain.set_exception(ConnectionError("the client is gone"))
        for turn in self._asked.values():
            if not turn.done():
                turn.set_exception(ConnectionError("the client is gone"))
        for task in (*self.tasks, *([self._making_room] if self._making_room else [])):
            task.cancel()
        self._server.budget.give(self._reserved_bytes)
        self._reserved_bytes = 0
        self._buffer.clear()
        self._server.part(self)

    # Frames

    def _take_frames(self) -> None:
        """Hand on each frame that is whole, as far as there may be more requests."""
        at, buffer = 0, self._buffer
        self._is_gathering = True
        try:
            while not self.is_closed and not self._is_full() and len(buffer) - at >= SIZE_BYTES:
                size = frame_size(buffer[at : at + SIZE_BYTES])
                end = at + SIZE_BYTES + size
                if end > len(buffer):
                    self._expect(size)
                    break
                frame = bytes(memoryview(buffer)[at + SIZE_BYTES : end])
                at = end
                self._give_back()
                self._server.take(self, decode(frame))
        except FrameError as error:
            self._flush()  # what came before is answered
            self.drop("frame", str(error))
        finally:
            self._is_gathering = False
            self._flush()
        del buffer[:at]
        if not buffer or self._is_paused:
            self.begun_s = None
        elif at or self.begun_s is None:
            self.begun_s = self.heard_s

    def _is_full(self) -> bool:
        """Whether no more is to be read for now; then the transport is told."""
        is_full = (
            len(self.tasks) >= self._server.limits.requests_max
            or self.stuck_s is not None
            or self._making_room is not None
        )
        if is_full and not self._is_paused and self._transport is not None:
            self._is_paused = True
            # Backpressure: what the client sends stays in its own socket until there is room.
            self._transport.pause_reading()
        return is_full

    def go_on(self) -> None:
        """Read on, if that was not to be, and may be now."""
        if self._is_paused and not self.is_closed and not self._is_full():
            assert self._transport is not None
            self._is_paused = False
            self.heard_s = self._server.clock.monotonic_s()
            self._take_frames()
            if not self._is_paused and not self.is_closed:
                self._transport.resume_reading()

    def _expect(self, size: int) -> None:
        """A frame of this size is coming: a large one needs room, or waits for it."""
        if size <= BUFFER_BYTES or self._reserved_bytes:
            return
        if self._server.budget.try_take(size):
            self._reserved_bytes = size
            return
        self._making_room = asyncio.create_task(self._make_room(size))
        self._is_full()

    async def _make_room(self, size: int) -> None:
        await self._server.budget.take(size)
        self._reserved_bytes, self._making_room = size, None
        self.go_on()

    def _give_back(self) -> None:
        self._server.budget.give(self._reserved_bytes)
        self._reserved_bytes = 0

    # Answers

    def write(self, command: Command) -> int:
        """Write a command, at the latest when the frames that came with its request are done; its size in bytes.

        Raises:
            ConnectionError: The client is gone.
            FrameError: It is too large.
        """
        chunks: list[Buffer] = encode(command)
        if self.is_closed or self._transport is None:
            raise ConnectionError("the client is gone")
        size = sum(map(len, chunks))  # type: ignore[arg-type] # of bytes
        self._gathered += chunks
        self._gathered_bytes += size
        if not self._is_gathering or self._gathered_bytes >= GATHER_BYTES:
            self._flush()
        return size

    def answered(self, asked: Exchange) -> None:
        """Its answer is written: its room is given back when that has gone."""
        self._answered.append(asked)
        if not self._gathered:
            self._flush()

    def _flush(self) -> None:
        """Give the system what is gathered, and let go of those whose answers that were."""
        chunks, self._gathered = self._gathered, []
        if chunks and not self.is_closed and self._transport is not None:
            self._transport.writelines(chunks)  # type: ignore[arg-type] # any buffer will do
            self._written_bytes += self._gathered_bytes
        self._gathered_bytes = 0
        answered, self._answered = self._answered, []
        for asked in answered:
            self._server.let_go(asked)

    def note_taken(self, now_s: float) -> None:
        """Who is slow, as over a thin line, and takes something is not stuck."""
        assert self._transport is not None
        taken_bytes = self._written_bytes - self._transport.get_write_buffer_size()
        if self.stuck_s is not None and taken_bytes > self._taken_bytes:
            self.stuck_s = now_s
        self._taken_bytes = taken_bytes

    async def drained(self) -> None:
        """Wait until most of what was written has gone."""
        if self.stuck_s is None:
            return
        drain: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._drains.add(drain)
        try:
            await drain
        finally:
            self._drains.discard(drain)

    def tell(self, command: Command) -> None:
        """Write something that nobody waits for; to who takes nothing it is not written."""
        if self.stuck_s is None and not self.is_closed:
            self.write(command)

    async def ask(self, command: Command, timeout_s: float) -> Command:
        """Ask the client something; its answer.

        Raises:
            ConnectionError: It is gone, or takes nothing, or is asked too much already.
            TimeoutError: It did not answer.
        """
        if self.stuck_s is not None or len(self._asked) >= ASKED_MAX:
            raise ConnectionError("the client does not keep up with what it is asked")
        opaque = next(self._opaque)
        turn: asyncio.Future[Command] = asyncio.get_running_loop().create_future()
        self._asked[opaque] = turn
        try:
            self.write(replace(command, opaque=opaque))
            async with asyncio.timeout(timeout_s):
                return await turn
        finally:
            del self._asked[opaque]

    def hear(self, answer: Command) -> None:
        """The client answers; what comes too late, or to nothing, is nobody's."""
        turn = self._asked.get(answer.opaque)
        if turn is not None and not turn.done():
            turn.set_result(answer)

    def drop(self, reason: str, why: str) -> None:
        """End it now, because of what the client did."""
        if not self.is_closed:
            self._server.note_dropped(self, reason, why)
            self.abort()

    def abort(self) -> None:
        """End it now."""
        self.is_closed = True
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """End it when what was written has gone."""
        self._flush()
        self.is_closed = True
        if self._transport is not None:
            self._transport.close()


class Exchange:
    """A request, and the room that its answer takes until it is sent."""

    def __init__(
        self, connection: Connection, request: Command, budget: Budget, began_s: float
    ) -> None:
        """No room is taken."""
        self.connection = connection  # over which it came
        self.request = request  # what is asked
        self.began_s = began_s  # when it was read, on the monotonic clock
        self._budget = budget
        self._taken_bytes = 0

    def try_room(self, size_bytes: int) -> bool:
        """Take room for an answer of so many bytes if that needs no waiting; whether it was taken."""
        if not self.connection.answers.try_take(size_bytes):
            return False
        if not self._budget.try_take(size_bytes):
            self.connection.answers.give(size_bytes)
            return False
        self._taken_bytes += size_bytes
        return True

    async def make_room(self, size_bytes: int) -> None:
        """Wait until an answer of so many bytes may be prepared; the server gives the room back when it is sent."""
        await self.connection.answers.take(size_bytes)
        try:
            await self._budget.take(size_bytes)
        except BaseException:
            self.connection.answers.give(size_bytes)
            raise
        self._taken_bytes += size_bytes

    def resize(self, size_bytes: int) -> None:
        """The answer turned out to have so many bytes."""
        more = size_bytes - self._taken_bytes
        self._taken_bytes = size_bytes
        self.connection.answers.give(-more)
        self._budget.give(-more)

    def slim(self) -> None:
        """Keep no more of the request than its answer needs: many may be held, each with a large header."""
        self.request = replace(self.request, remark="", fields={}, body=())

    def end(self) -> None:
        """Give the room back."""
        self.resize(0)


Handled: TypeAlias = "Command | Coroutine[None, None, Command]"
Handler: TypeAlias = "Callable[[Exchange], Handled]"
"""Gives the answer, or a coroutine of it; may raise ``RefusalError``."""


class RemotingServer:
    """Listens, and answers what connections ask. Of one loop; use it from its thread."""

    def __init__(
        self,
        handlers: Mapping[int, Handler],
        clock: Clock,
        limits: ServerLimits | None = None,
        *,
        on_gone: Callable[[Connection], None] = lambda _connection: None,
        guard: Callable[[Command, str], None] = lambda _request, _peer: None,
    ) -> None:
        """Listen at nothing yet.

        Args:
            guard: Is shown each request and its client's address first; what it raises is the answer.
        """
        self.limits = limits or ServerLimits()  # of what clients may take
        self.counters = Counters()  # what was done
        self.budget = Budget(self.limits.bytes_max)  # bytes of all connections
        self.connections: set[Connection] = set()  # that are open
        self.handlers = handlers  # by code; may be set until ``listen`` is called
        self.clock = clock  # measures
        self._on_gone = on_gone
        self._guard = guard
        self.on_answered: Callable[[int, float], None] = lambda _code, _seconds: None
        """Told of each request's code and how long its answer took; the time that it was held counts."""
        self._servers: list[asyncio.Server] = []
        self._watch: asyncio.Task[None] | None = None
        self._is_closing = False

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Take connections at an address, perhaps besides others; the port, where 0 was asked for."""
        loop = asyncio.get_running_loop()
        # (An address is a number or this machine's own name: to look that up is not waiting.)
        listeners = listening(Address(host, port), "--listen")
        for listener in listeners:
            server = await loop.create_server(
                lambda: Connection(self),
                sock=listener,
                ssl=tls,
                backlog=BACKLOG,
                ssl_handshake_timeout=self.limits.frame_s if tls else None,
            )
            self._servers.append(server)
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_silence())
        return int(listeners[0].getsockname()[1])

    async def close(self, drain_s: float) -> bool:
        """Take no new work, wait for what is under way, and end all connections.

        Returns:
            Whether all that was under way was answered.
        """
        self._is_closing = True
        for server in self._servers:
            server.close()
        under_way = [task for connection in self.connections for task in connection.tasks]
        left: set[asyncio.Task[None]] = set()
        if under_way:
            _, left = await asyncio.wait(under_way, timeout=drain_s)
        # Only when all was answered, or time is over: closing cuts what is under way.
        for connection in list(self.connections):
            connection.close()
        until_s = self.clock.monotonic_s() + LINGER_S
        while self.connections and self.clock.monotonic_s() < until_s:  # noqa: ASYNC110 (of many)
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.abort()
        if self._watch is not None:
            self._watch.cancel()
        return not left

    # -- connections ------------------------------------------------------------------------------

    def welcome(self, connection: Connection) -> bool:
        """Whether a new connection may stay."""
        if self._is_closing or len(self.connections) >= self.limits.connections_max:
            self.counters.refused_connections += 1
            return False
        self.connections.add(connection)
        return True

    def part(self, connection: Connection) -> None:
        """A connection has ended."""
        if connection in self.connections:
            self.connections.discard(connection)
            self._on_gone(connection)

    def note_dropped(self, connection: Connection, reason: str, why: str = "") -> None:
        """A connection ended by what the client did; no reason: it went as it should."""
        if reason:
            self.counters.dropped[reason] += 1
        if why:
            _LOG.info("connection of %s ended: %s", connection.peer, why)

    async def _watch_silence(self) -> None:
        """Disconnect who keeps us waiting."""
        limits = self.limits
        pause_s = min(1.0, min(limits.idle_s, limits.frame_s, limits.send_s) / 4)
        while True:
            await asyncio.sleep(pause_s)
            now_s = self.clock.monotonic_s()
            for connection in list(self.connections):
                connection.note_taken(now_s)
                if connection.stuck_s is not None:
                    if now_s - connection.stuck_s > limits.send_s:
                        connection.drop("slow", f"it took nothing for {limits.send_s:.0f} s")
                elif connection.begun_s is not None and now_s - connection.begun_s > limits.frame_s:
                    connection.drop("silence", "a frame was not finished in time")
                elif now_s - connection.heard_s > limits.idle_s and not connection.tasks:
                    connection.drop("silence", "")

    # -- requests ---------------------------------------------------------------------------------

    def take(self, connection: Connection, request: Command) -> None:
        """See a request on its way."""
        if request.is_answer:
            connection.hear(request)
            return
        self.counters.requests[counted(request.code)] += 1
        asked = Exchange(connection, request, self.budget, self.clock.monotonic_s())
        try:
            found = self._dispatch(asked)
        except Exception as error:  # noqa: BLE001 (each request is answered)
            found = failed(request, error)
        if isinstance(found, Command):
            with contextlib.suppress(ConnectionError):
                self._finish(asked, found)
            connection.answered(asked)
        else:
            self._work_on(asked, self._answer(asked, found))

    def let_go(self, asked: Exchange) -> None:
        """An answer was written: give its room back, at the latest when the client has taken most of what it is sent."""
        if asked.connection.stuck_s is None:
            asked.end()
        else:
            self._work_on(asked, _await_sent(asked.connection))

    def _work_on(self, asked: Exchange, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        asked.connection.tasks.add(task)
        task.add_done_callback(lambda done: self._done(asked, done))

    def _done(self, asked: Exchange, task: asyncio.Task[None]) -> None:
        """An answer has gone, or never will: also when the connection ended before the task began."""
        asked.end()
        asked.connection.tasks.discard(task)
        asked.connection.go_on()

    def _dispatch(self, asked: Exchange) -> Handled:
        code = asked.request.code
        self._guard(asked.request, asked.connection.peer)
        handler = self.handlers.get(code)
        if handler is not None:
            return handler(asked)
        known = BY_CODE.get(code)
        if known is not None and known.answer is Treatment.REFUSED:
            raise RefusalError(Code.NO_PERMISSION, READ_ONLY)
        name = f"request {code}" if known is None else known.name
        raise RefusalError(Code.REQUEST_CODE_NOT_SUPPORTED, f"{name} is not supported: {READ_ONLY}")

    async def _answer(self, asked: Exchange, work: Coroutine[None, None, Command]) -> None:
        try:
            answer = await work
        except Exception as error:  # noqa: BLE001 (each request is answered)
            answer = failed(asked.request, error)
        with contextlib.suppress(ConnectionError):
            self._finish(asked, answer)
            await asked.connection.drained()

    def _finish(self, asked: Exchange, answer: Command) -> None:
        """Write the answer, as the protocol wants it."""
        request = asked.request
        if not request.is_oneway:
            answer = self._write(asked.connection, request, answer)
        # What a consumer was asked and answers is passed on as it is, whatever its code.
        self.counters.answers[answer.code if answer.code in _CODES else OTHER] += 1
        self.on_answered(counted(request.code), self.clock.monotonic_s() - asked.began_s)

    def _write(self, connection: Connection, request: Command, answer: Command) -> Command:
        """Write it, or if that cannot be, why not; what was written."""
        answer = _addressed(answer, request)
        try:
            self.counters.sent_bytes += connection.write(answer)
        except (FrameError, UnicodeEncodeError) as error:
            answer = _addressed(failed(request, error), request)
            connection.write(answer)
        return answer


async def _await_sent(connection: Connection) -> None:
    """Wait until most of what was written has gone, or nothing will."""
    with contextlib.suppress(ConnectionError):
        await connection.drained()


def _addressed(answer: Command, request: Command) -> Command:
    # Each field by its place: ``replace`` takes ten times as long, and every answer comes by here.
    return Command(
        answer.code,
        request.opaque,
        ANSWER,
        answer.remark,
        answer.fields,
        answer.body,
        answer.language,
        answer.version,
        request.form,
    )


def counted(code: int) -> int:
    """As what a request is counted: those that nobody knows together, since there may be any number of them."""
    return code if code in BY_CODE else OTHER


def failed(request: Command, error: Exception) -> Command:
    """The answer to a request that failed; a defect of ours is logged."""
    if isinstance(error, RefusalError):
        return Command(error.code, remark=error.remark, fields=error.fields)
    if isinstance(error, TieredStoreError):
        return Command(Code.SYSTEM_ERROR, remark=str(error))
    _LOG.error("request %d failed", request.code, exc_info=error)
    return Command(Code.SYSTEM_ERROR, remark=f"a defect of the mount: {type(error).__name__}")


def _address(name: object) -> str:
    """``host:port`` of a socket's name."""
    if isinstance(name, tuple):
        return str(Address(str(name[0]), int(name[1])))
    return str(name or "")
