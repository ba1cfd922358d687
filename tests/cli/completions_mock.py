#!/usr/bin/env python3
"""A server of /v1/models and streamed /v1/completions whose answers follow from the prompt, for the
load generator's test. Prints its port. What goes wrong is chosen by the model's name:
  good      nothing
  plain     no usage in events before the last, as some servers have it
  refusing  every third request: 429
  breaking  every third stream ends without [DONE]
  wrong     every second answer to a prompt differs from the first
"""
import collections
import http.server
import json
import sys
import threading

lock = threading.Lock()
state = {"requests": 0, "times": collections.Counter()}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path != "/v1/models":
            self.answer(404, {"error": {"message": "no " + self.path}})
            return
        self.answer(200, {"data": [{"id": "good"}]})

    def event(self, value):
        text = value if isinstance(value, str) else json.dumps(value)
        data = f"data: {text}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind, prompt, n = asked["model"], asked["prompt"], asked["max_tokens"]
        assert asked["stream"] and asked["ignore_eos"] and asked["temperature"] == 0
        if self.headers.get("Authorization") not in (None, "Bearer right"):
            self.answer(401, {"error": {"message": "wrong key"}})
            return
        with lock:
            state["requests"] += 1
            times = state["times"][(kind, *prompt)] = state["times"][(kind, *prompt)] + 1
            number = state["requests"]
        self.stream(kind, prompt, n, number, times)

    def stream(self, kind, prompt, n, number, times):
        if kind == "refusing" and number % 3 == 0:
            self.answer(429, {"error": {"message": "the queue is full"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for i in range(n):
            text = f" {(prompt[i % len(prompt)] * 31 + i) % 997}"
            if kind == "wrong" and times % 2 == 0 and i == n - 1:
                text = " ?"
            usage = {"prompt_tokens": len(prompt), "completion_tokens": i + 1}
            self.event({"choices": [{"index": 0, "text": text}],
                        "usage": None if kind == "plain" else usage})
            if kind == "breaking" and number % 3 == 0 and i == n // 2:
                self.close_connection = True
                return
        self.event({"choices": [], "usage": {
            "prompt_tokens": len(prompt), "completion_tokens": n,
            "prompt_tokens_details": {"cached_tokens": len(prompt) // 2}}})
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 256


server = Server(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
sys.stdout.close()
server.serve_forever()
