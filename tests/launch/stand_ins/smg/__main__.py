"""A router that knows its workers at once and answers every call with one token."""

import http.server
import json
import sys
from typing import ClassVar


def values(flag: str) -> list[str]:
    return [sys.argv[index + 1] for index, word in enumerate(sys.argv) if word == flag]


class Router(http.server.BaseHTTPRequestHandler):
    def answer(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    overload: ClassVar[dict[str, object]] = {}

    def do_GET(self) -> None:
        urls = values("--prefill") + values("--decode")
        workers = [{"id": url[-5:], "url": url, "is_healthy": True} for url in urls]
        for worker in workers:
            worker |= {"overload": self.overload[worker["id"]]} if worker["id"] in self.overload else {}
        self.answer({"workers": workers})

    def do_PUT(self) -> None:
        spec = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.overload[self.path.rpartition("/")[2]] = spec["overload"]
        self.answer({"status": "accepted"})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"text": "x"})

    def log_message(self, *_: object) -> None:
        pass


http.server.ThreadingHTTPServer(("127.0.0.1", int(values("--port")[0])), Router).serve_forever()
