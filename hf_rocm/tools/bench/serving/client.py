"""Request a completion over HTTP from a server on this machine, and record when each piece of its text arrived."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

# The kinds of errors after a server has ended.
REFUSED, CLOSED = LOST = ("connection refused", "connection lost")
HOST = "127.0.0.1"
COMPLETIONS, CHAT = "completions", "chat"
# endpoint → path
PATHS = {COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions"}
# The largest number of characters that are kept of an error message.
_DETAIL = 200
_LONGEST_LINE = 2**20


class Request(NamedTuple):
    """A request for `new` tokens after a prompt.

    stream: whether the response is sent in pieces. endpoint: a key of `PATHS`. leave: whether the client disconnects
    when half of a streamed response has arrived.
    """

    prompt: str
    new: int
    stream: bool
    endpoint: str = COMPLETIONS
    leave: bool = False

    def body(self, model: str) -> dict[str, Any]:
        """Return the JSON of a greedy request whose response does not stop at an end-of-sequence token."""
        settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": self.new}
        content: dict[str, Any] = (
            {"messages": [{"role": "user", "content": self.prompt}]}
            if self.endpoint == CHAT
            else {"prompt": self.prompt}
        )
        return {
            "model": model,
            **content,
            "max_tokens": self.new,
            "temperature": 0,
            "stream": self.stream,
            "generation_config": json.dumps(settings),
        }


@dataclass(frozen=True)
class Response:
    """The response to a request.

    sent, ended: when the request was sent and when the response ended, in seconds of `time.perf_counter`. pieces: when
    each piece of text arrived. prompt, tokens: the numbers of tokens in the prompt and in the response, as counted by
    the server. error: the kind of an error, or None. detail: the error's message. left: whether the client
    disconnected before the end, as requested; then `prompt` and `tokens` are 0.
    """

    sent: float
    ended: float
    text: str = ""
    pieces: tuple[float, ...] = ()
    prompt: int = 0
    tokens: int = 0
    error: str | None = None
    detail: str = ""
    left: bool = False


class _Failure(Exception):
    """A request failed. kind: the kind of error, by which errors are counted."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind)
        self.kind, self.detail = kind, detail


async def send_request(port: int, model: str, request: Request, *, timeout: float) -> Response:
    """Send one request and return its response, with an error if it failed. timeout: seconds for the whole request."""
    sent = time.perf_counter()
    try:
        response = await asyncio.wait_for(_exchange(port, model, request, sent), timeout)
    except _Failure as failure:
        return Response(sent, time.perf_counter(), error=failure.kind, detail=failure.detail[:_DETAIL])
    except asyncio.TimeoutError:
        return Response(sent, time.perf_counter(), error="timeout", detail=f"no complete response in {timeout:g} s")
    except ConnectionRefusedError as error:
        return Response(sent, time.perf_counter(), error=REFUSED, detail=str(error)[:_DETAIL])
    except (OSError, asyncio.IncompleteReadError) as error:
        return Response(sent, time.perf_counter(), error=CLOSED, detail=str(error)[:_DETAIL])
    if response.tokens != request.new and not response.left:
        return replace(response, error="wrong length", detail=f"{response.tokens} of {request.new} tokens")
    return response


async def _exchange(port: int, model: str, request: Request, sent: float) -> Response:
    reader, writer = await asyncio.open_connection(HOST, port, limit=_LONGEST_LINE)
    try:
        content = json.dumps(request.body(model)).encode()
        path = PATHS[request.endpoint]
        head = f"POST {path} HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        await writer.drain()
        status, headers = await _head(reader)
        parts = _body(reader, headers)
        if status != 200:
            raise _Failure(f"HTTP {status}", b"".join([part async for part in parts]).decode(errors="replace"))
        if headers.get("content-type", "").startswith("text/event-stream"):
            return await _streamed(parts, sent, request.new // 2 if request.leave else None)
        whole = _parsed(b"".join([part async for part in parts]))
        return _finished(Response(sent, time.perf_counter(), _text(whole)), whole)
    except (ValueError, asyncio.LimitOverrunError) as error:
        # An invalid status line, header or size, or a line longer than the limit.
        raise _Failure("malformed response", str(error)) from error
    finally:
        writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    line = (await reader.readline()).decode("latin-1")
    if not line:
        raise _Failure(CLOSED, "closed before a response")
    status = int(line.split()[1]) if line.startswith("HTTP/1.") and len(line.split()) > 1 else None
    if status is None:
        raise _Failure("malformed response", line)
    headers = {}
    while (line := (await reader.readline()).decode("latin-1").strip()) != "":
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return status, headers


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """Yield the parts of a body. Raises `IncompleteReadError` if a body of known size is cut off."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readuntil(b"\n")).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readuntil(b"\n")
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while part := await reader.read(_LONGEST_LINE):
            yield part


async def _streamed(parts: AsyncIterator[bytes], sent: float, most: int | None) -> Response:
    """Read a response from server-sent events. The last one contains the finish reason and the numbers of tokens.

    most: return after this number of pieces, which closes the connection; None: read the whole response.
    """
    texts, pieces, rest = [], [], b""
    last: dict[str, Any] | None = None
    async for part in parts:
        now = time.perf_counter()
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
                continue
            event = _parsed(line[len(b"data:") :])
            if event.get("error"):
                raise _Failure("error event", str(event["error"]))
            text = _text(event)
            if text:
                texts.append(text)
                pieces.append(now)
            if most is not None and len(pieces) >= most:
                return Response(sent, now, "".join(texts), tuple(pieces), left=True)
            if event["choices"][0].get("finish_reason"):
                last = event
    if last is None:
        raise _Failure("ended early", f"after {len(pieces)} pieces, without a finish reason")
    return _finished(Response(sent, time.perf_counter(), "".join(texts), tuple(pieces)), last)


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise _Failure("malformed response", f"not JSON: {data[:80].decode(errors='replace').strip()}") from error
    if not isinstance(event, dict):
        raise _Failure("malformed response", f"not an object: {str(event)[:80]}")
    return event


def _text(event: dict[str, Any]) -> str:
    try:
        choice = event["choices"][0]
        part = choice.get("delta") or choice.get("message") or {}
        return str(choice.get("text") or part.get("content") or "")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise _Failure("malformed response", f"no choices: {json.dumps(event)}") from error


def _finished(response: Response, event: dict[str, Any]) -> Response:
    try:
        usage = event["usage"]
        return replace(response, prompt=int(usage["prompt_tokens"]), tokens=int(usage["completion_tokens"]))
    except (KeyError, TypeError, ValueError) as error:
        raise _Failure("malformed response", "no token counts (usage)") from error
