"""A server that answers /health and has a child of its own, as stubborn as they come: SIGTERM means nothing to it.

STAND_IN=report prints its arguments and environment and ends; STAND_IN=die:ROLE ends in that role with code 3 after
it was up.
"""

import http.server
import json
import os
import subprocess
import sys
import threading
import time

from sglang.srt.server_args import prepare_server_args

STUBBORN = "import os, signal, time; os.setsid(); signal.signal(15, signal.SIG_IGN); time.sleep(600)"


class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def run_server(server_args) -> None:
    task = os.environ.get("STAND_IN", "")
    if task == "report":
        shown = {name: value for name, value in os.environ.items() if name.startswith(("BASIN", "SGLANG"))}
        print(json.dumps({"argv": server_args.argv, "environment": shown}), flush=True)
        return
    subprocess.Popen([sys.executable, "-S", "-c", STUBBORN])
    server = http.server.ThreadingHTTPServer(("127.0.0.1", server_args.port), Healthy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    if task == f"die:{server_args.disaggregation_mode}":
        for number in range(40):
            print(f"line {number} before the end", flush=True)
        time.sleep(1.5)
        os._exit(3)
    time.sleep(600)


if __name__ == "__main__":
    run_server(prepare_server_args(sys.argv[1:]))
