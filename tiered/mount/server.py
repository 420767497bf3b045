"""The remoting server: connections, frames, limits, and dispatch by the table of codes.

Overview
    One asyncio loop. Each connection is read frame by frame; a request goes to the handler of its code. What a handler
    answers at once is written at once; a coroutine runs as a task, so that held requests are in nobody's way. Answers may
    overtake each other, as the protocol allows.

Limits
    Connections, requests under way on each, and bytes: frames that are being received and answers that are not sent yet
    take of one budget for all, and answers of one of the connection's own besides, so that slow readers wait for
    themselves only. Who says nothing for ``idle_s``, does not finish a frame within ``frame_s``, or takes nothing for
    ``send_s`` is disconnected. What is in the socket's buffer below ``BUFFER_BYTES`` is no longer counted.

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
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, TypeAlias

from tiered.errors import InvalidError, TieredStoreError
from tiered.format.remoting import (
    ANSWER,
    SIZE_BYTES,
    Command,
    FrameError,
    decode,
    encode,
    frame_size,
)
from tiered.mount.codes import BY_CODE, Answer, Code, RefusalError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Coroutine, Mapping

    from typing_extensions import Buffer

    from tiered.clock import Clock

_LOG = logging.getLogger("tiered.mount")
BUFFER_BYTES: Final = 64 * 1024
READ_ONLY: Final = "this broker is mounted read-only from its tier"


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What clients may take of this process.

    Attributes:
        connections_max: At once; further ones are closed at once.
        requests_max: Under way on one connection, held ones included; further ones are not read until one ends.
        bytes_max: Of frames being received and answers being sent, of all connections.
        answer_bytes_max: Of answers being sent on one connection.
        idle_s: Of a connection that says nothing.
        frame_s: For the rest of a frame.
        send_s: For an answer.
    """

    connections_max: int = 4096
    requests_max: int = 8192
    bytes_max: int = 256 * 1024 * 1024
    answer_bytes_max: int = 4 * 1024 * 1024
    idle_s: float = 120.0
    frame_s: float = 30.0
    send_s: float = 60.0


class Budget:
    """Bytes that may be taken; who wants more than there are waits, in order. For one loop."""

    def __init__(self, bytes_max: int) -> None:
        """Nothing is taken."""
        self.bytes_max = bytes_max
        self.used_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size_bytes: int) -> None:
        """Take bytes; more than there are in all only when nobody has any."""
        if not self._waiting and self._fits(size_bytes):
            self.used_bytes += size_bytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(size_bytes)
            raise

    def give(self, size_bytes: int) -> None:
        """Give bytes back; below 0: take them without waiting, even if there are none left."""
        self.used_bytes -= size_bytes
        while self._waiting:
            wanted, turn = self._waiting[0]
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
    """What a server has done.

    Attributes:
        requests: By code.
        answers: By code of the answer.
        busy_s: Time from a request's frame to its answer, by code; held ones count while they are held.
        refused_connections: There were too many.
        dropped: Connections ended because of what the client did, by reason.
        sent_bytes: Of answers.
    """

    requests: Counter[int] = field(default_factory=Counter)
    answers: Counter[int] = field(default_factory=Counter)
    busy_s: dict[int, float] = field(default_factory=dict)
    refused_connections: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    sent_bytes: int = 0


class Connection:
    """A client's connection.

    Attributes:
        peer: Its address, for people.
        local: Our address that it has reached.
        answers: Budget of its answers.
        tasks: Requests under way.
        is_closed: Nothing goes over it any more.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        limits: ServerLimits,
    ) -> None:
        """Take over an accepted connection."""
        self.reader = reader
        self.peer = _address(writer.get_extra_info("peername"))
        self.local = _address(writer.get_extra_info("sockname"))
        self.answers = Budget(limits.answer_bytes_max)
        self.tasks: set[asyncio.Task[None]] = set()
        self.is_closed = False
        self._writer = writer
        self._send_s = limits.send_s
        writer.transport.set_write_buffer_limits(BUFFER_BYTES)

    async def send(self, command: Command) -> int:
        """Write a command, and wait until most of it has gone; its size in bytes.

        Raises:
            ConnectionError: The client is gone, or takes nothing.
            FrameError: It is too large.
        """
        pieces: list[Buffer] = encode(command)
        if self.is_closed:
            raise ConnectionError("closed")
        self._writer.writelines(pieces)  # type: ignore[arg-type] # any buffer will do
        try:
            async with asyncio.timeout(self._send_s):
                await self._writer.drain()
        except TimeoutError:
            self.abort()
            raise ConnectionError(f"it took nothing for {self._send_s:.0f} s") from None
        return sum(memoryview(piece).nbytes for piece in pieces)

    def tell(self, command: Command) -> None:
        """Write something that nobody waits for; to who takes nothing it is not written."""
        if not self.is_closed and self._writer.transport.get_write_buffer_size() < BUFFER_BYTES:
            self._writer.writelines(encode(command))  # type: ignore[arg-type]

    def abort(self) -> None:
        """End it now."""
        self.is_closed = True
        self._writer.transport.abort()

    async def close(self) -> None:
        """End it when what was written has gone, within a second."""
        self.is_closed = True
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()
        self._writer.transport.abort()


class Exchange:
    """A request, and the room that its answer takes until it is sent.

    Attributes:
        connection: Over which it came.
        request: What is asked.
        began_s: When it was read, on the monotonic clock.
    """

    def __init__(
        self, connection: Connection, request: Command, budget: Budget, began_s: float
    ) -> None:
        """No room is taken."""
        self.connection = connection
        self.request = request
        self.began_s = began_s
        self._budget = budget
        self._taken_bytes = 0

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

    def end(self) -> None:
        """Give the room back."""
        self.resize(0)


Handled: TypeAlias = "Command | Coroutine[None, None, Command]"
Handler: TypeAlias = "Callable[[Exchange], Handled]"
"""Gives the answer, or a coroutine of it; may raise ``RefusalError``."""


class RemotingServer:
    """See the module's contract. Of one loop; use it from its thread.

    Attributes:
        handlers: By code; may be set until ``listen`` is called.
        limits: Of what clients may take.
        counters: What was done.
        budget: Bytes of all connections.
        connections: That are open.
    """

    def __init__(
        self,
        handlers: Mapping[int, Handler],
        clock: Clock,
        limits: ServerLimits | None = None,
        *,
        on_gone: Callable[[Connection], None] = lambda _connection: None,
    ) -> None:
        """Listen at nothing yet.

        Args:
            handlers: By code.
            clock: Measures.
            limits: Of what clients may take.
            on_gone: Told of a connection that has ended.
        """
        self.limits = limits or ServerLimits()
        self.counters = Counters()
        self.budget = Budget(self.limits.bytes_max)
        self.connections: set[Connection] = set()
        self.handlers = handlers
        self._clock = clock
        self._on_gone = on_gone
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._is_closing = False

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Take connections at an address; the port, where 0 was asked for.

        Raises:
            InvalidError: The address cannot be listened at.
        """
        try:
            self._server = await asyncio.start_server(
                self._accept, host or None, port, ssl=tls, backlog=1024, limit=BUFFER_BYTES
            )
        except OSError as error:
            raise InvalidError(
                f"cannot listen at {host or '*'}:{port}: {error.strerror or error}",
                where="--listen",
                do="choose an address of this machine and a free port",
            ) from error
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self, drain_s: float) -> bool:
        """Take no new work, wait for what is under way, and end all connections.

        Returns:
            Whether all that was under way was answered.
        """
        self._is_closing = True
        if self._server is not None:
            self._server.close()
        under_way = [task for connection in self.connections for task in connection.tasks]
        left: set[asyncio.Task[None]] = set()
        if under_way:
            _, left = await asyncio.wait(under_way, timeout=drain_s)
        await asyncio.gather(*(connection.close() for connection in list(self.connections)))
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        return not left

    # -- connections ------------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_closing or len(self.connections) >= self.limits.connections_max:
            self.counters.refused_connections += 1
            writer.transport.abort()
            return
        connection = Connection(reader, writer, self.limits)
        self.connections.add(connection)
        serving = asyncio.current_task()
        assert serving is not None
        self._serving.add(serving)
        try:
            await self._serve(connection)
        finally:
            self._serving.discard(serving)
            await self._end(connection)

    async def _serve(self, connection: Connection) -> None:
        reason = ""
        try:
            while not (connection.is_closed or self._is_closing):
                await self._take_one(connection)
        except FrameError as error:
            reason = "frame"
            _LOG.info("connection of %s ended: %s", connection.peer, error)
        except TimeoutError:
            reason = "silence"
        except asyncio.IncompleteReadError as error:
            reason = "cut" if error.partial else ""
        except OSError:
            reason = "network"
        except asyncio.CancelledError:
            if not self._is_closing:
                raise
        if reason:
            self.counters.dropped[reason] += 1

    async def _end(self, connection: Connection) -> None:
        self.connections.discard(connection)
        connection.is_closed = True
        for task in connection.tasks:
            task.cancel()
        self._on_gone(connection)
        connection.abort()

    async def _take_one(self, connection: Connection) -> None:
        """Read a request and see it on its way."""
        while len(connection.tasks) >= self.limits.requests_max:
            await asyncio.wait(connection.tasks, return_when=asyncio.FIRST_COMPLETED)
        async with asyncio.timeout(self.limits.idle_s):
            size = frame_size(await connection.reader.readexactly(SIZE_BYTES))
        await self.budget.take(size)
        try:
            async with asyncio.timeout(self.limits.frame_s):
                request = decode(await connection.reader.readexactly(size))
        finally:
            self.budget.give(size)
        if not request.is_answer:  # what we ask clients wants no answer
            await self._begin(connection, request)

    # -- requests ---------------------------------------------------------------------------------

    async def _begin(self, connection: Connection, request: Command) -> None:
        self.counters.requests[request.code] += 1
        asked = Exchange(connection, request, self.budget, self._clock.monotonic_s())
        try:
            found = self._dispatch(asked)
        except Exception as error:  # noqa: BLE001 (each request is answered)
            found = failed(request, error)
        if isinstance(found, Command):
            await self._finish(asked, found)
            return
        task = asyncio.create_task(self._answer(asked, found))
        connection.tasks.add(task)
        task.add_done_callback(connection.tasks.discard)

    def _dispatch(self, asked: Exchange) -> Handled:
        code = asked.request.code
        handler = self.handlers.get(code)
        if handler is not None:
            return handler(asked)
        known = BY_CODE.get(code)
        if known is not None and known.answer is Answer.REFUSED:
            raise RefusalError(Code.NO_PERMISSION, READ_ONLY)
        name = f"request {code}" if known is None else known.name
        raise RefusalError(Code.REQUEST_CODE_NOT_SUPPORTED, f"{name} is not supported: {READ_ONLY}")

    async def _answer(self, asked: Exchange, work: Coroutine[None, None, Command]) -> None:
        try:
            try:
                answer = await work
            except Exception as error:  # noqa: BLE001 (each request is answered)
                answer = failed(asked.request, error)
            with contextlib.suppress(OSError):
                await self._finish(asked, answer)
        finally:
            asked.end()

    async def _finish(self, asked: Exchange, answer: Command) -> None:
        """Send the answer, as the protocol wants it."""
        request = asked.request
        if not request.is_oneway:
            answer = await self._send(asked.connection, request, answer)
        self.counters.answers[answer.code] += 1
        busy_s = self.counters.busy_s
        taken_s = self._clock.monotonic_s() - asked.began_s
        busy_s[request.code] = busy_s.get(request.code, 0.0) + taken_s

    async def _send(self, connection: Connection, request: Command, answer: Command) -> Command:
        """Send it, or if that cannot be, why not; what was sent."""
        answer = _addressed(answer, request)
        try:
            self.counters.sent_bytes += await connection.send(answer)
        except (FrameError, UnicodeEncodeError) as error:
            answer = _addressed(failed(request, error), request)
            await connection.send(answer)
        return answer


def _addressed(answer: Command, request: Command) -> Command:
    return replace(answer, opaque=request.opaque, flag=ANSWER, form=request.form)


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
        host, port = name[:2]
        return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
    return str(name or "")
