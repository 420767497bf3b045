"""The server itself: frames that are none, limits, slow and silent clients, and its end."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from support.waiting import until_async

from tiered.clock import SystemClock
from tiered.format.remoting import (
    ANSWER,
    FRAME_BYTES_MAX,
    ONEWAY,
    Command,
    Form,
    decode,
    encode,
    frame_size,
)
from tiered.mount.protocol import Code, RefusalError
from tiered.mount.server import GATHER_BYTES, OTHER, Budget, Exchange, RemotingServer, ServerLimits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Mapping

    from tiered.mount.server import Handler

ECHO, HOLD, FAIL, LARGE = 30, 11, 31, 32
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def run(work: Coroutine[None, None, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await work

    asyncio.run(limited())


def echo(asked: Exchange) -> Command:
    return Command(0, fields=asked.request.fields, body=asked.request.body)


def fail(_asked: Exchange) -> Command:
    raise RefusalError(Code.QUERY_NOT_FOUND, "none", {"why": "so"})


@asynccontextmanager
async def serving(
    handlers: Mapping[int, Handler] | None = None, **limits: object
) -> AsyncIterator[tuple[RemotingServer, int]]:
    known = {ECHO: echo, FAIL: fail} | dict(handlers or {})
    server = RemotingServer(known, SystemClock(), ServerLimits(**limits))  # type: ignore[arg-type]
    port = await server.listen("127.0.0.1", 0)
    try:
        yield server, port
    finally:
        await server.close(1.0)
        await until_async(lambda: not server.connections)
        await until_async(lambda: server.budget.used_bytes == 0)


async def connect(port: int) -> Streams:
    return await asyncio.open_connection("127.0.0.1", port)


def frame(code: int, opaque: int = 1, flag: int = 0, body: bytes = b"") -> bytes:
    chunks = (body,) if body else ()
    return b"".join(encode(Command(code, opaque, flag, body=chunks, form=Form.ROCKETMQ)))


async def receive(reader: asyncio.StreamReader) -> Command:
    return decode(await reader.readexactly(frame_size(await reader.readexactly(4))))


async def ended(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read(1) == b""
    except ConnectionError:
        return True


def test_an_answer_bears_the_number_and_form_of_its_request():
    async def work() -> None:
        async with serving() as (server, port):
            reader, writer = await connect(port)
            writer.write(frame(ECHO, opaque=77, body=b"body"))
            found = await receive(reader)
            assert (found.opaque, found.flag, found.form) == (77, ANSWER, Form.ROCKETMQ)
            assert found.text() == b"body"
            writer.write(frame(FAIL, opaque=78))
            found = await receive(reader)
            assert (found.code, found.remark, found.fields) == (22, "none", {"why": "so"})
            assert server.counters.requests == {ECHO: 1, FAIL: 1}
            assert server.counters.answers == {0: 1, 22: 1}
            writer.close()

    run(work())


def test_codes_that_nobody_knows_are_counted_together():
    async def work() -> None:
        async with serving() as (server, port):
            reader, writer = await connect(port)
            answered: list[int] = []
            server.on_answered = lambda code, _seconds: answered.append(code)
            for code in (9_001, 9_002, -7):
                writer.write(frame(code))
                assert (await receive(reader)).code == Code.REQUEST_CODE_NOT_SUPPORTED
            assert server.counters.requests == {OTHER: 3}
            assert answered == [OTHER] * 3
            writer.close()

    run(work())


def test_what_wants_no_answer_gets_none():
    async def work() -> None:
        async with serving() as (_, port):
            reader, writer = await connect(port)
            writer.write(frame(ECHO, 1, ONEWAY) + frame(ECHO, 2, ANSWER) + frame(ECHO, 3))
            assert (await receive(reader)).opaque == 3
            writer.close()

    run(work())


def test_held_requests_are_in_nobodys_way_and_answers_may_overtake():
    async def work() -> None:
        turn = asyncio.Event()

        async def hold(_asked: Exchange) -> Command:
            await turn.wait()
            return Command(0)

        async with serving({HOLD: hold}) as (_, port):
            reader, writer = await connect(port)
            writer.write(frame(HOLD, 1) + frame(ECHO, 2))
            assert (await receive(reader)).opaque == 2
            turn.set()
            assert (await receive(reader)).opaque == 1
            writer.close()

    run(work())


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        struct.pack(">I", 3),
        struct.pack(">I", FRAME_BYTES_MAX + 1),
        struct.pack(">II", 8, 7 << 24 | 4) + b"abcd",
        struct.pack(">II", 8, 4) + b"[1]",
    ],
)
def test_what_is_no_frame_ends_its_connection_alone(data: bytes):
    async def work() -> None:
        async with serving() as (server, port):
            reader, writer = await connect(port)
            other_reader, other = await connect(port)
            writer.write(data + bytes(64))
            assert await ended(reader)
            other.write(frame(ECHO))
            assert (await receive(other_reader)).code == 0
            assert server.counters.dropped == {"frame": 1}
            other.close()
            writer.close()

    run(work())


def test_a_defect_is_answered_and_logged(caplog: pytest.LogCaptureFixture):
    def broken(_asked: Exchange) -> Command:
        raise KeyError("secret")

    async def work() -> None:
        async with serving({HOLD: broken}) as (_, port):
            reader, writer = await connect(port)
            writer.write(frame(HOLD))
            found = await receive(reader)
            assert (found.code, found.remark) == (1, "a defect of the mount: KeyError")
            writer.close()

    run(work())
    assert "request 11 failed" in caplog.text


def test_an_answer_that_is_too_large_is_told():
    def huge(_asked: Exchange) -> Command:
        return Command(0, body=(bytes(FRAME_BYTES_MAX),))

    async def work() -> None:
        async with serving({LARGE: huge}) as (_, port):
            reader, writer = await connect(port)
            writer.write(frame(LARGE))
            assert (await receive(reader)).code == Code.SYSTEM_ERROR
            writer.close()

    run(work())


def test_connections_are_limited():
    async def work() -> None:
        async with serving(connections_max=2) as (server, port):
            kept = [await connect(port) for _ in range(2)]
            await until_async(lambda: len(server.connections) == 2)
            reader, writer = await connect(port)
            assert await ended(reader)
            assert server.counters.refused_connections == 1
            kept[0][1].close()
            await until_async(lambda: len(server.connections) == 1)
            again_reader, again = await connect(port)
            again.write(frame(ECHO))
            assert (await receive(again_reader)).code == 0
            for _, one in (*kept, (reader, writer), (again_reader, again)):
                one.close()

    run(work())


@pytest.mark.parametrize("sent", [b"", b"\0", struct.pack(">I", 1000) + b"some"])
def test_who_says_nothing_or_stops_amid_a_frame_is_disconnected(sent: bytes):
    async def work() -> None:
        async with serving(idle_s=0.2, frame_s=0.2) as (server, port):
            reader, writer = await connect(port)
            writer.write(sent)
            assert await ended(reader)
            assert server.counters.dropped == {"silence": 1}
            writer.close()

    run(work())


def test_requests_under_way_die_with_their_connection():
    async def work() -> None:
        died = asyncio.Event()

        async def hold(asked: Exchange) -> Command:
            await asked.make_room(1000)
            try:
                await asyncio.Event().wait()
            finally:
                died.set()
            return Command(0)

        async with serving({HOLD: hold}) as (server, port):
            _, writer = await connect(port)
            writer.write(frame(HOLD))
            await until_async(lambda: server.budget.used_bytes == 1000)
            writer.transport.abort()
            await died.wait()

    run(work())


def test_a_slow_reader_takes_its_own_share_and_is_disconnected_at_last():
    """It asks for a thousand answers of 64 KiB and reads none; another is served all the while."""
    size = 64 * 1024

    async def large(asked: Exchange) -> Command:
        await asked.make_room(size)
        return Command(0, body=(bytes(size),))

    async def work() -> None:
        limits = {"answer_bytes_max": 4 * size, "send_s": 1.0}
        async with serving({LARGE: large}, **limits) as (server, port):
            _, slow = await connect(port)
            slow.write(b"".join(frame(LARGE, number) for number in range(1000)))
            await until_async(lambda: server.budget.used_bytes >= 4 * size)
            reader, writer = await connect(port)
            for _ in range(20):
                writer.write(frame(LARGE))
                assert (await receive(reader)).body_bytes == size
                assert server.budget.used_bytes <= 6 * size
            await until_async(lambda: len(server.connections) == 1)
            slow.close()
            writer.close()

    run(work())


def test_who_takes_an_answer_slowly_but_steadily_gets_it():
    """As over a thin line: it takes longer than who takes nothing is waited for."""
    size = 12 << 20

    async def large(asked: Exchange) -> Command:
        await asked.make_room(size)
        return Command(0, body=(bytes(size),))

    async def work() -> None:
        async with serving({LARGE: large}, send_s=0.5) as (server, port):
            loop, client = asyncio.get_running_loop(), socket.create_connection(("127.0.0.1", port))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            client.setblocking(False)
            client.send(frame(LARGE))
            left = size
            while left > 0 and (chunk := await loop.sock_recv(client, 1 << 18)):
                left -= len(chunk)
                await asyncio.sleep(0.02)
            assert left <= 0
            assert not server.counters.dropped
            client.close()

    run(work())


def test_answers_to_frames_that_come_together_are_gathered_and_keep_their_room():
    size, held = GATHER_BYTES // 2, []

    def large(asked: Exchange) -> Command:
        held.append(asked.connection.answers.used_bytes)
        assert asked.try_room(size)
        return Command(0, body=(bytes(size),))

    async def work() -> None:
        async with serving({LARGE: large}) as (_, port):
            reader, writer = await connect(port)
            writer.write(b"".join(frame(LARGE, number) for number in range(5)))
            assert [(await receive(reader)).opaque for _ in range(5)] == [*range(5)]
            assert held[1] == size  # the first waits for the second, which fills what goes together
            assert max(held) < 5 * size
            writer.close()

    run(work())


def test_requests_under_way_on_one_connection_are_limited():
    async def work() -> None:
        under_way = []

        async def hold(_asked: Exchange) -> Command:
            under_way.append(1)
            await turn.wait()
            return Command(0)

        turn = asyncio.Event()
        async with serving({HOLD: hold}, requests_max=3) as (_, port):
            reader, writer = await connect(port)
            writer.write(b"".join(frame(HOLD, number) for number in range(10)))
            await until_async(lambda: len(under_way) == 3)
            await asyncio.sleep(0.1)
            assert len(under_way) == 3
            turn.set()
            assert {(await receive(reader)).opaque for _ in range(10)} == set(range(10))
            writer.close()

    run(work())


def test_at_its_end_what_is_under_way_is_finished():
    async def work() -> None:
        turn = asyncio.Event()

        async def hold(_asked: Exchange) -> Command:
            await turn.wait()
            return Command(0)

        async with serving({HOLD: hold}) as (server, port):
            reader, writer = await connect(port)
            writer.write(frame(HOLD))
            await until_async(lambda: any(one.tasks for one in server.connections))
            closing = asyncio.create_task(server.close(20.0))
            await asyncio.sleep(0.05)
            turn.set()
            assert (await receive(reader)).code == 0
            assert await closing
            assert await ended(reader)
            writer.close()

    run(work())


def test_what_does_not_finish_is_given_up():
    async def work() -> None:
        async def hold(_asked: Exchange) -> Command:
            await asyncio.Event().wait()
            return Command(0)

        async with serving({HOLD: hold}) as (server, port):
            reader, writer = await connect(port)
            writer.write(frame(HOLD))
            await until_async(lambda: any(one.tasks for one in server.connections))
            assert not await server.close(0.1)
            assert await ended(reader)
            writer.close()

    run(work())


def test_a_budget_is_taken_in_order_and_never_exceeded_but_by_one():
    async def work() -> None:
        budget, order = Budget(100), []

        async def take(name: str, size: int) -> None:
            await budget.take(size)
            order.append(name)

        await take("more than all", 1000)
        waiting = [
            asyncio.create_task(take(name, size))
            for name, size in (("large", 90), ("cancelled", 5), ("small", 20))
        ]
        await asyncio.sleep(0)
        waiting[1].cancel()
        await asyncio.sleep(0)
        assert order == ["more than all"]
        budget.give(1000)
        await asyncio.sleep(0.01)
        assert order == ["more than all", "large"]
        budget.give(90)
        await asyncio.sleep(0.01)
        assert order[-1] == "small"
        assert budget.used_bytes == 20

    run(work())
