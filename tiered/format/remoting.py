"""One command of RocketMQ's remoting protocol: a request or its answer, in either form of the header.

All integers are big-endian. A frame:

====== ============ ===========================================================
offset bytes        field
====== ============ ===========================================================
0      4            size: bytes behind this field
4      1            form of the header: 0 JSON, 1 ROCKETMQ
5      3            bytes of the header
8      header       see below
..     rest         body
====== ============ ===========================================================

Header of form 1; that of form 0 is a JSON object with the same fields by name, and ``extFields`` an object of texts:

========= ================ ====================================================
bytes     field            notes
========= ================ ====================================================
2         code             signed, so that larger ones need JSON
1         language         number; see ``LANGUAGES``
2         version          ordinal of the sender's version, signed
4         opaque           the asker's number of the request; signed
4         flag             bit 0: an answer; bit 1: no answer is wanted
4 + n     remark           UTF-8; empty: none
4         size of fields   bytes that follow
2+n, 4+n  name, value      UTF-8, repeated
========= ================ ====================================================

What is decoded is bounded before anything is allocated for it; whatever the bytes, the outcome is a ``Command`` or a
``FrameError``.

``RemotingClient`` asks a server over TCP: many requests at once, matched with their answers by ``opaque``.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from dataclasses import field, replace
from enum import IntEnum
from itertools import count
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from backends.lazy_dataclass import dataclass
from tiered.model import Closing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from typing_extensions import Buffer

SIZE_BYTES: Final = 4
FRAME_BYTES_MAX: Final = 16 * 1024 * 1024
"""Of the size field, as on both sides of RocketMQ."""
HEADER_BYTES_MAX: Final = 1024 * 1024
FIELDS_MAX: Final = 1024
VERSION: Final = 479
"""Ordinal of the protocol's version 5.3.3."""
ANSWER: Final = 1
ONEWAY: Final = 2
LANGUAGES: Final = (
    *("JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG", "RUBY", "OTHER", "HTTP", "GO"),
    *("PHP", "OMS", "RUST", "NODE_JS"),
)
"""Names by number."""
_OTHER: Final = LANGUAGES.index("OTHER")
_JSON = json.JSONDecoder()
_SPACE: Final = " \t\r\n"
_quoted = json.encoder.encode_basestring_ascii
_LENGTHS = Struct(">II")
_LENGTH = Struct(">I")
_NAME = Struct(">H")
_FIXED = Struct(">hBhiii")
_INT_MIN, _INT_MAX = -(1 << 31), (1 << 31) - 1
_SHORT_MAX = (1 << 15) - 1


class FrameError(ValueError):
    """Bytes that are no frame of this protocol. The connection that they came over is of no use any more."""


class Form(IntEnum):
    """How a header is written; the number is that of the wire."""

    JSON = 0
    ROCKETMQ = 1


@dataclass(slots=True)
class Command:
    """A request or an answer. Nobody changes one: frozen, it would take three times as long to make."""

    code: int  # what is asked, or how it went
    opaque: int = 0  # number of the request among its connection's
    flag: int = 0  # ``ANSWER``, ``ONEWAY``
    remark: str = ""  # for people; empty: none
    fields: Mapping[str, str] = field(default_factory=dict)  # the named values, all as text
    body: Sequence[Buffer] = ()  # chunks that follow one another; what was decoded has one or none
    language: str = "JAVA"  # of the sender; what is not in ``LANGUAGES`` is ``OTHER``
    version: int = VERSION  # ordinal of the sender's version
    form: Form = Form.JSON  # of the header

    @property
    def is_answer(self) -> bool:
        """It answers a request with the same ``opaque``."""
        return bool(self.flag & ANSWER)

    @property
    def is_oneway(self) -> bool:
        """Nobody waits for an answer."""
        return bool(self.flag & ONEWAY)

    @property
    def body_bytes(self) -> int:
        """Size of the body."""
        return sum(memoryview(chunk).nbytes for chunk in self.body)

    def text(self) -> bytes:
        """The body in one piece."""
        return b"".join(self.body)


def encode(command: Command) -> list[Buffer]:
    """The frame in chunks, the body's as they are. FrameError: it exceeds ``FRAME_BYTES_MAX``, or a number does not fit."""
    header = _json_header(command) if command.form is Form.JSON else _binary_header(command)
    size = SIZE_BYTES + len(header) + command.body_bytes
    if size > FRAME_BYTES_MAX or len(header) > HEADER_BYTES_MAX:
        raise FrameError(f"a frame of {size} bytes with a header of {len(header)}")
    lengths = _LENGTHS.pack(size, command.form << 24 | len(header))
    return [lengths + header, *command.body]


def frame_size(prefix: Buffer) -> int:
    """Bytes that follow the first four; FrameError: too few or too many."""
    size: int = _LENGTH.unpack(prefix)[0]
    if not SIZE_BYTES <= size <= FRAME_BYTES_MAX:
        raise FrameError(f"a frame of {size} bytes; there are 4 at least and {FRAME_BYTES_MAX} at most")  # fmt: skip
    return size


def decode(frame: bytes) -> Command:
    """Undo ``encode``; FrameError: the bytes are no frame."""
    if len(frame) < SIZE_BYTES:
        raise FrameError(f"a frame of {len(frame)} bytes")
    word: int = _LENGTH.unpack_from(frame)[0]
    form, size = word >> 24, word & 0xFF_FFFF
    end = SIZE_BYTES + size
    if form not in {Form.JSON, Form.ROCKETMQ}:
        raise FrameError(f"a header of form {form}; there are 0 and 1")
    if end > len(frame) or size > HEADER_BYTES_MAX:
        raise FrameError(f"a header of {size} bytes in a frame of {len(frame)}")
    body = (memoryview(frame)[end:],) if end < len(frame) else ()
    header = frame[SIZE_BYTES:end]
    return _of_json(header, body) if form == Form.JSON else _of_binary(header, body)


# -- JSON -----------------------------------------------------------------------------------------


def _json_header(command: Command) -> bytes:
    # Put together by hand: ``json.dumps`` takes three times as long, and every answer comes by here.
    remark = f'"remark":{_quoted(command.remark)},' if command.remark else ""
    pairs = [f"{_quoted(name)}:{_quoted(value)}" for name, value in command.fields.items()]
    fields = f'"extFields":{{{",".join(pairs)}}},' if pairs else ""
    return (
        f'{{"code":{command.code:d},"language":{_quoted(command.language)},"version":{command.version:d}'
        f',"opaque":{command.opaque:d},"flag":{command.flag:d},{remark}{fields}'
        '"serializeTypeCurrentRPC":"JSON"}'
    ).encode()


def _of_json(header: bytes, body: Sequence[Buffer]) -> Command:
    try:
        text = header.decode().strip(_SPACE)
        document, end = _JSON.raw_decode(text)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a header that is not JSON: {error}") from error
    if end < len(text):
        raise FrameError(f"a header whose JSON ends at character {end} of {len(text)}")
    if not isinstance(document, dict):
        raise FrameError("a header that is not a JSON object")
    fields = document.get("extFields") or {}
    if not isinstance(fields, dict) or len(fields) > FIELDS_MAX:
        raise FrameError(f"extFields is not an object of {FIELDS_MAX} values at most")
    if not set(map(type, fields.values())) <= {str}:  # Java writes nothing but texts
        fields = {name: _text(value) for name, value in fields.items() if value is not None}
    language, said = document.get("language"), document.get("remark")
    remark = said if isinstance(said, str) else ""
    if b"\\u" in header:  # seldom
        _require_characters(remark, *fields, *fields.values())
    return Command(
        _whole(document, "code"),
        _whole(document, "opaque", 0),
        _whole(document, "flag", 0),
        remark,
        fields,
        body,
        language if language in LANGUAGES else "OTHER",
        _whole(document, "version", 0),
        Form.JSON,
    )


def _whole(document: dict[str, Any], name: str, otherwise: int | None = None) -> int:
    value = document.get(name, otherwise)
    if not isinstance(value, int) or not _INT_MIN <= value <= _INT_MAX:
        raise FrameError(f"a header whose {name} is not a number of 32 bits")
    return int(value)


def _require_characters(*texts: str) -> None:
    """Refuse half a character (a surrogate by itself), which nothing could write as UTF-8 later.

    Those that stand for bytes of a topic that are no UTF-8 (``surrogateescape``) can be written, and may come.
    """
    try:
        "".join(texts).encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise FrameError("a header with a text that is not UTF-8") from error


def _text(value: object) -> str:
    """A value of ``extFields``: text, or what other clients than Java write as it is."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int):
        return str(value)
    raise FrameError("extFields has a value that is neither a text nor a whole number")


# -- ROCKETMQ -------------------------------------------------------------------------------------


def _binary_header(command: Command) -> bytes:
    if not -_SHORT_MAX <= command.code <= _SHORT_MAX:
        raise FrameError(f"code {command.code} does not fit into a header of form 1")
    fixed = _FIXED.pack(
        command.code,
        LANGUAGES.index(command.language),
        command.version,
        command.opaque,
        command.flag,
        len(remark := command.remark.encode()),
    )
    pairs = b"".join(
        _NAME.pack(len(key := name.encode())) + key + _LENGTH.pack(len(text := value.encode())) + text
        for name, value in command.fields.items()
    )  # fmt: skip
    return fixed + remark + _LENGTH.pack(len(pairs)) + pairs


def _of_binary(header: bytes, body: Sequence[Buffer]) -> Command:
    if len(header) < _FIXED.size:
        raise FrameError(f"a header of {len(header)} bytes; there are {_FIXED.size} at least")
    code, language, version, opaque, flag, size = _FIXED.unpack_from(header)
    remark, at = _cut(header, _FIXED.size, size)
    fields = _fields(header, at) if at < len(header) else {}
    name = LANGUAGES[language if language < len(LANGUAGES) else _OTHER]
    return Command(code, opaque, flag, remark, fields, body, name, version, Form.ROCKETMQ)


def _fields(header: bytes, at: int) -> dict[str, str]:
    """The fields from ``at`` to the header's end. Hot: of a request this is most of the work."""
    found: dict[str, str] = {}
    end = len(header)
    try:
        size = _LENGTH.unpack_from(header, at)[0]
        at += 4
        if at + size != end:
            raise FrameError(f"fields of {size} bytes where {end - at} follow")
        while at < end:
            middle = at + 2 + _NAME.unpack_from(header, at)[0]
            behind = middle + 4 + _LENGTH.unpack_from(header, middle)[0]
            if behind > end:
                raise FrameError(f"a field that ends at byte {behind} of a header of {end}")
            found[header[at + 2 : middle].decode()] = header[middle + 4 : behind].decode()
            at = behind
            if len(found) > FIELDS_MAX:
                raise FrameError(f"more than {FIELDS_MAX} fields")
    except struct.error as error:
        raise FrameError(f"a header that ends within a number: {error}") from error
    except UnicodeDecodeError as error:
        raise FrameError(f"a text that is not UTF-8, at byte {at} of a header") from error
    return found


def _cut(header: bytes, at: int, size: int) -> tuple[str, int]:
    if not 0 <= size <= len(header) - at:
        raise FrameError(f"a text of {size} bytes at byte {at} of a header of {len(header)}")
    try:
        return header[at : at + size].decode(), at + size
    except UnicodeDecodeError as error:
        raise FrameError(f"a text that is not UTF-8, at byte {at} of a header") from error


# -- asking ---------------------------------------------------------------------------------------

UNDER_WAY_MAX: Final = 128
UNDER_WAY_BYTES_MAX: Final = 4 * 1024 * 1024


class RemotingClient(Closing):
    """A connection to a server, for requests of one thread; ``close`` it.

    After an error it is of no use any more; what had been asked may or may not have been done.
    """

    def __init__(
        self, host: str, port: int, timeout_s: float, *, connect_s: float | None = None
    ) -> None:
        """Connect within ``connect_s``; nothing may come of an answer that is waited for during ``timeout_s``."""
        self._opaque, self._timeout_s = count(1), timeout_s
        self._socket = socket.create_connection((host, port), connect_s or timeout_s)
        self._socket.settimeout(timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, request: Command) -> Command:
        """One question. OSError: no answer came in time, or the connection ended."""
        return next(self._answers([request]))[1]

    def ask_all(self, requests: Sequence[Command]) -> tuple[list[Command | None], str]:
        """Many questions, a bounded number of them under way: the answers, in the order of the questions.

        None: none came, and nobody knows what became of it. And why the connection is of no use any more; empty: it is.
        """
        found: list[Command | None] = [None] * len(requests)
        try:
            for at, answer in self._answers(requests):
                found[at] = answer
        except (OSError, FrameError) as error:
            return found, str(error) or type(error).__name__
        return found, ""

    def _answers(self, requests: Sequence[Command]) -> Iterator[tuple[int, Command]]:
        """Each answer as it comes, with the number of its request."""
        waiting: dict[int, tuple[int, int]] = {}
        size = 0
        for at, request in enumerate(requests):
            numbered = replace(request, opaque=next(self._opaque))
            frame = b"".join(encode(numbered))
            while waiting and (
                len(waiting) >= UNDER_WAY_MAX or size + len(frame) > UNDER_WAY_BYTES_MAX
            ):
                number, freed, answer = self._next_of(waiting)
                size -= freed
                yield number, answer
            waiting[numbered.opaque] = at, len(frame)
            size += len(frame)
            self._socket.sendall(frame)
        while waiting:
            number, _, answer = self._next_of(waiting)
            yield number, answer

    def _next_of(self, waiting: dict[int, tuple[int, int]]) -> tuple[int, int, Command]:
        """The next answer to something that is waited for; what the server says of itself is passed over."""
        while True:
            answer = decode(self._receive(frame_size(self._receive(SIZE_BYTES))))
            known = waiting.pop(answer.opaque, None) if answer.is_answer else None
            if known is not None:
                return *known, answer

    def _receive(self, size_bytes: int) -> bytes:
        chunks: list[bytes] = []
        left = size_bytes
        while left:
            chunk = self._socket.recv(min(left, 1 << 16))
            if not chunk:
                raise ConnectionError(f"it ended the connection {left} bytes before the end")
            chunks.append(chunk)
            left -= len(chunk)
        return b"".join(chunks)

    @property
    def is_ended(self) -> bool:
        """Whether the server has ended it, as one does that hears nothing for minutes. Between questions."""
        try:
            self._socket.setblocking(False)
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self._socket.settimeout(self._timeout_s)

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            self._socket.close()
