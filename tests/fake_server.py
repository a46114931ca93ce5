"""A local server of a language model, whose answers a test decides."""

import collections
import contextlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator

TORN = (200, {"Content-Length": 999}, b'{"choices": [')  # ends in the middle of the body


class Server(http.server.ThreadingHTTPServer):
  """Answers each request with the JSON, or the (status, headers, body), that `act` returns.

  None hangs up.
  """

  def __init__(self, act: Callable):
    super().__init__(("127.0.0.1", 0), Handler)
    self.act = act  # (body, number of the request) -> answer
    self.troubles = collections.deque()  # answers to the next requests, in place of `act`
    self.asked = []  # (path, body) of each request so far
    self.lock = threading.Lock()
    self.url = f"http://127.0.0.1:{self.server_port}/v1"

  @property
  def bodies(self) -> list[dict]:
    return [body for _, body in self.asked]


class Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"

  def log_message(self, *_) -> None:
    pass

  def do_POST(self) -> None:
    server = self.server
    body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
    with server.lock:
      number = len(server.asked)
      server.asked.append((self.path, body))
    try:
      answer = server.troubles.popleft()
    except IndexError:
      answer = server.act(body, number)
    if answer is None:
      self.close_connection = True
      return
    if not isinstance(answer, tuple):
      answer = 200, {}, json.dumps(answer).encode()
    status, headers, data = answer
    self.send_response(status)
    for key, value in ({"Content-Length": len(data)} | headers).items():
      self.send_header(key, str(value))
    self.end_headers()
    self.wfile.write(data)
    if "Content-Length" in headers:  # half a body
      self.close_connection = True


@contextlib.contextmanager
def running(server: http.server.HTTPServer) -> Iterator[http.server.HTTPServer]:
  """Runs an HTTP server in a thread."""
  with server:
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
      yield server
    finally:
      server.shutdown()
