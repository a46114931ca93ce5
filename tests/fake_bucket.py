"""A local server with those parts of Cloud Storage that gcsfs, tensorstore and orbax use."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator

NAME = "bucket"


class Server(http.server.ThreadingHTTPServer):
  """Serves one bucket from memory.  `objects`: name to bytes and generation."""

  daemon_threads = True
  request_queue_size = 128  # connections at once; beyond, they wait for seconds

  def __init__(self):
    super().__init__(("localhost", 0), Handler)
    self.objects: dict[str, tuple[bytes, int]] = {}
    self.uploads: dict[str, bytearray] = {}  # resumable ones under way, by name
    self.generation = 1
    self.lock = threading.Lock()

  @property
  def url(self) -> str:
    return f"http://localhost:{self.server_port}"

  def environment(self) -> dict[str, str]:
    """Environment variables that make a process use this server as Cloud Storage."""
    return {
      "STORAGE_EMULATOR_HOST": self.url,
      "TENSORSTORE_GCS_HTTP_URL": self.url,
      # gcsfs would ask another API, by gRPC, which kind of bucket it is; this is the plain kind
      "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
      "EPATH_USE_TF": "false",  # which knows no stand-in
    }


class Handler(http.server.BaseHTTPRequestHandler):
  server: Server
  protocol_version = "HTTP/1.1"
  disable_nagle_algorithm = True

  def log_message(self, *_) -> None:
    pass

  def handle(self) -> None:
    with contextlib.suppress(ConnectionError):  # gcsfs asks twice at once, and takes one answer
      super().handle()

  def answer(self, code: int, data: bytes | dict = b"", headers: dict[str, str] | None = None):
    if isinstance(data, dict):
      data, headers = json.dumps(data).encode(), {"Content-Type": "application/json"}
    self.send_response(code)
    for key, value in (headers or {}).items():
      self.send_header(key, value)
    self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    self.wfile.write(data)

  def describe(self, name: str) -> dict:
    data, generation = self.server.objects[name]
    time = f"2000-01-01T00:00:00.{generation:06}Z"
    fields = {"size": str(len(data)), "generation": str(generation), "metageneration": "1"}
    fields |= {"timeCreated": time, "updated": time, "contentType": "application/octet-stream"}
    return fields | {"kind": "storage#object", "bucket": NAME, "name": name, "id": name}

  def handle_request(self) -> None:
    url = urllib.parse.urlsplit(self.path)
    query = dict(urllib.parse.parse_qsl(url.query))
    body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
    with self.server.lock:
      if re.fullmatch(rf"/upload/(storage/v1/b/)?{NAME}(/o)?", url.path):
        self.upload(query, body)
      elif found := re.fullmatch(rf"(?:/download)?/storage/v1/b/{NAME}(?:/o(?:/(.+))?)?", url.path):
        target = found[1] and re.split("/(?:rewriteTo|moveTo)/(?:b/[^/]+/)?o/", found[1])
        self.of_objects(url.path, target and [*map(urllib.parse.unquote, target)], query)
      else:
        self.answer(404)

  do_GET = do_POST = do_DELETE = do_PUT = handle_request

  def of_objects(self, path: str, target: list[str] | None, query: dict[str, str]) -> None:
    objects = self.server.objects
    if not target:
      self.list(query) if path.endswith("/o") else self.answer(200, {"name": NAME, "id": NAME})
    elif target[0] not in objects:
      self.answer(404)
    elif not self.allowed(target[0], query):
      self.answer(304 if "ifGenerationNotMatch" in query else 412)
    elif len(target) == 2:
      self.store(target[1], objects[target[0]][0])
      if "/moveTo/" in path:
        del objects[target[0]]
        self.answer(200, self.describe(target[1]))
      else:
        self.answer(200, {"done": True, "resource": self.describe(target[1])})
    elif self.command == "DELETE":
      del objects[target[0]]
      self.answer(204)
    elif query.get("alt") == "media":
      self.media(*objects[target[0]])
    else:
      self.answer(200, self.describe(target[0]))

  def allowed(self, name: str, query: dict[str, str]) -> bool:
    generation = str(self.server.objects.get(name, (b"", 0))[1])
    same = query.get("ifGenerationMatch", generation) == generation
    return same and query.get("ifGenerationNotMatch") != generation

  def media(self, data: bytes, generation: int) -> None:
    headers = {"x-goog-generation": str(generation), "x-goog-stored-content-length": str(len(data))}
    if not (asked := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))):
      return self.answer(200, data, headers)
    start = int(asked[1]) if asked[1] else max(0, len(data) - int(asked[2]))
    end = min(int(asked[2]) + 1, len(data)) if asked[1] and asked[2] else len(data)
    if start >= len(data):
      return self.answer(416)
    headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
    return self.answer(206, data[start:end], headers)

  def list(self, query: dict[str, str]) -> None:
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
    names, folders = [], set()
    for name in sorted(n for n in self.server.objects if n.startswith(prefix)):
      head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
      if found:
        folders.add(prefix + head + delimiter)
      elif query.get("startOffset", "") <= name < query.get("endOffset", "\U0010ffff"):
        names.append(name)
    self.answer(200, {"items": [*map(self.describe, names)], "prefixes": sorted(folders)})

  def store(self, name: str, data: bytes) -> None:
    self.server.generation += 1
    self.server.objects[name] = bytes(data), self.server.generation

  def upload(self, query: dict[str, str], body: bytes) -> None:
    kind, name = query.get("uploadType"), query.get("name", "")
    if kind == "multipart":
      boundary = re.search(r'boundary="?([^";]+)"?', self.headers["Content-Type"])[1].encode()
      metadata, content = body.split(b"--" + boundary)[1:3]
      name = json.loads(metadata.partition(b"\n\n")[2])["name"]
      body = content.partition(b"\n\n")[2].removesuffix(b"\n")
    elif kind == "resumable":
      self.server.uploads[name] = bytearray()
      location = f"{self.server.url}/upload/{NAME}?{urllib.parse.urlencode({'name': name})}"
      return self.answer(200, headers={"Location": location})
    elif asked := re.fullmatch(r"bytes (\S+)/(\S+)", self.headers.get("Content-Range", "")):
      self.server.uploads[name] += body
      if asked[2] == "*":
        last = f"bytes=0-{len(self.server.uploads[name]) - 1}"
        return self.answer(308, headers={"Range": last})
      body = self.server.uploads.pop(name)
    if not self.allowed(name, query):
      return self.answer(412)
    self.store(name, body)
    return self.answer(200, self.describe(name))


@contextlib.contextmanager
def serving() -> Iterator[Server]:
  """An empty bucket, until the block ends."""
  server = Server()
  thread = threading.Thread(target=server.serve_forever, daemon=True)
  thread.start()
  try:
    yield server
  finally:
    server.shutdown()
    server.server_close()
