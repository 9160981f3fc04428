"""A server, in a thread or a process, that answers completion requests immediately or simulates a fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# The faults that the server can simulate.
FAULTS = (
    # HTTP status 500.
    "status",
    # A line that is not JSON.
    "garbage",
    "no-choices",
    "no-usage",
    "error-event",
    # The stream ends without a `finish_reason`.
    "early",
    # The connection is closed within a chunk.
    "cut",
    # The line with the size of a chunk does not end.
    "endless-size",
    # The answer has one token too few.
    "short",
    # No answer for 30 seconds.
    "silent",
    "not-http",
    # The process ends.
    "die",
)
USAGE = {"prompt_tokens": 3, "total_tokens": 0}


def word(prompt: str, index: int) -> str:
    """The text of a token, which depends only on the prompt and the index."""
    return f" {sum(prompt.encode()) % 97 + index}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fault: str | None = None
    # Number of answers before the fault.
    after = 0
    # Appended to every answer.
    suffix = ""
    # Number of requests in progress.
    busy = 0
    most = 0
    answered = 0
    lock = threading.Lock()

    def do_POST(self) -> None:
        cls = type(self)
        with cls.lock:
            cls.busy += 1
            cls.most = max(cls.most, cls.busy)
            cls.answered += 1
            fault = cls.fault if cls.answered > cls.after else None
        try:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(body, fault)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            with cls.lock:
                cls.busy -= 1

    def answer(self, body: dict, fault: str | None) -> None:
        self.close_connection = True
        if fault == "die":
            os._exit(7)
        if fault == "silent":
            time.sleep(30)
        if fault == "status":
            self.send(500, "application/json", b'{"error": "no memory"}')
            return
        if fault == "not-http":
            self.wfile.write(b"hello\n")
            return
        new = body["max_tokens"] - (fault == "short")
        self.chat = self.path == "/v1/chat/completions"
        prompt = body["messages"][0]["content"] if self.chat else body["prompt"]
        texts = [word(prompt, index) for index in range(new)]
        texts[-1] += self.suffix
        usage = {**USAGE, "completion_tokens": new}
        if not body["stream"]:
            event = self.event("".join(texts), "length", usage if fault != "no-usage" else None)
            self.send(200, "application/json", b"{" if fault == "garbage" else json.dumps(event).encode())
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for index, text in enumerate(texts):
            line = f"data: {json.dumps(self.event(text))}\n\n".encode()
            if fault in ("garbage", "no-choices", "error-event") and index == 1:
                line = {"garbage": b"data: {oh\n\n", "no-choices": b'data: {"choices": []}\n\n',
                        "error-event": b'data: {"error": "worker died"}\n\n'}[fault]  # fmt: skip
            if fault == "endless-size":
                self.wfile.write(b"0" * 2**21)
                return
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line) + (9 if fault == "cut" else 0), line))
            if fault == "cut":
                return
        if fault != "early":
            last = json.dumps(self.event("", "length", usage if fault != "no-usage" else None))
            line = f": a comment\n\ndata: {last}\n\ndata: [DONE]\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.write(b"0\r\n\r\n")

    def event(self, text: str, reason: str | None = None, usage: dict | None = None) -> dict:
        part = "message" if reason and usage and text else "delta"
        content = {part: {"content": text}} if self.chat else {"text": text}
        event = {"choices": [{**content, "index": 0, **({"finish_reason": reason} if reason else {})}]}
        return {**event, **({"usage": usage} if usage else {})}

    def send(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


class Quiet(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, *_: object) -> None:
        pass


@contextmanager
def answering(fault: str | None = None, after: int = 0) -> Iterator[type[Handler]]:
    """Run a server in a thread. Yields its handler class, whose attribute `port` is the server's port."""
    handler = type("OneHandler", (Handler,), {"fault": fault, "after": after, "lock": threading.Lock()})
    server = Quiet(("127.0.0.1", 0), handler)
    handler.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield handler
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def main(fault: str = "", after: str = "0", suffix: str = "", child: str = "") -> None:
    """Run a server in this process, and print uvicorn's message.

    fault, after, suffix: as in `Handler`. child: start a child process, and write its id to this file.
    """
    if child:
        sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(child, "w") as file:  # noqa: PTH123
            file.write(str(sleeper.pid))
    Handler.fault, Handler.after, Handler.suffix = fault or None, int(after), suffix
    server = Quiet(("127.0.0.1", 0), Handler)
    print(
        f"INFO:     Uvicorn running on http://127.0.0.1:{server.server_address[1]} (Press CTRL+C to quit)", flush=True
    )
    server.serve_forever()
