"""A router that knows its workers at once and answers every call with one token."""

import http.server
import json
import sys


def values(flag: str) -> list[str]:
    return [sys.argv[index + 1] for index, word in enumerate(sys.argv) if word == flag]


class Router(http.server.BaseHTTPRequestHandler):
    def answer(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        urls = values("--prefill") + values("--decode")
        self.answer({"workers": [{"url": url, "is_healthy": True} for url in urls]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"text": "x"})

    def log_message(self, *_: object) -> None:
        pass


http.server.ThreadingHTTPServer(("127.0.0.1", int(values("--port")[0])), Router).serve_forever()
