"""A local server with the parts of Cloud Storage that gcsfs, tensorstore and orbax use."""

import contextlib
import http.server
import json
import re
import threading
import urllib.parse
import zlib

NAME = "bucket"
PATH = re.compile(rf"(/\w+)?/storage/v1/b/{NAME}(/o)?(?:/(.+?))?(?:/moveTo/(?:b/[^/]+/)?o/(.+))?")


class Server(http.server.ThreadingHTTPServer):
  """Serves one bucket from memory: `objects`, name to bytes."""

  daemon_threads = True
  request_queue_size = 128  # connections at once: further ones would wait for seconds

  def __init__(self):
    super().__init__(("localhost", 0), Handler)
    self.objects: dict[str, bytes] = {}
    self.parts: dict[str, bytes] = {}  # the parts received of unfinished uploads
    self.lock = threading.Lock()
    self.url = f"http://localhost:{self.server_port}"
    self.environment = {  # makes a process use this server for Cloud Storage
      "STORAGE_EMULATOR_HOST": self.url,
      "TENSORSTORE_GCS_HTTP_URL": self.url,
      # without this gcsfs asks for the kind of bucket over gRPC
      "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
      "EPATH_USE_TF": "false",  # TensorFlow's client cannot use another server
    }


class Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  disable_nagle_algorithm = True

  def log_message(self, *_) -> None:
    pass

  def handle(self) -> None:
    # gcsfs sends a request twice and closes one of the connections
    with contextlib.suppress(ConnectionError):
      super().handle()

  def answer(self, code: int, data: bytes | dict = b"", **headers: str) -> None:
    if isinstance(data, dict):
      data, headers = json.dumps(data).encode(), {"Content-Type": "application/json"}
    self.send_response(code)
    for key, value in headers.items():
      self.send_header(key.replace("_", "-"), value)
    self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    self.wfile.write(data)

  def describe(self, name: str) -> dict:
    data, time = self.server.objects[name], "2000-01-01T00:00:00.000000Z"
    fields = {"size": str(len(data)), "generation": generation(data), "metageneration": "1"}
    fields |= {"timeCreated": time, "updated": time, "contentType": "application/octet-stream"}
    return fields | {"kind": "storage#object", "bucket": NAME, "name": name, "id": name}

  def handle_request(self) -> None:
    url = urllib.parse.urlsplit(self.path)
    query = dict(urllib.parse.parse_qsl(url.query))
    body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
    if not (parts := PATH.fullmatch(url.path)):
      return self.answer(404)
    kind, listing, name, to = (part and urllib.parse.unquote(part) for part in parts.groups())
    with self.server.lock:
      return self.act(kind, listing, name, to, query, body)

  do_GET = do_POST = do_DELETE = do_PUT = handle_request

  def act(self, kind, listing, name, to, query: dict[str, str], body: bytes) -> None:
    objects = self.server.objects
    if kind == "/upload" and query.get("uploadType") == "resumable":
      name = urllib.parse.urlencode({"name": query["name"]})
      self.answer(200, Location=f"{self.server.url}/upload/storage/v1/b/{NAME}/o?{name}")
    elif kind == "/upload":
      body = self.server.parts.pop(query["name"], b"") + body
      if self.headers.get("Content-Range", "").endswith("/*"):  # more parts follow
        self.server.parts[query["name"]] = body
        self.answer(308, Range=f"bytes=0-{len(body) - 1}")
      else:
        objects[query["name"]] = body
        self.answer(200, self.describe(query["name"]))
    elif not name:
      self.answer(200, self.list(query) if listing else {"name": NAME, "id": NAME})
    elif name not in objects:
      self.answer(404)
    elif to:
      objects[to] = objects.pop(name)
      self.answer(200, self.describe(to))
    elif self.command == "DELETE":
      del objects[name]
      self.answer(204)
    elif query.get("alt") == "media":
      self.media(objects[name])
    else:
      self.answer(200, self.describe(name))

  def media(self, data: bytes) -> None:
    headers = {"x-goog-generation": generation(data)}
    headers["x-goog-stored-content-length"] = str(len(data))
    if not (asked := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))):
      return self.answer(200, data, **headers)
    start = int(asked[1]) if asked[1] else max(0, len(data) - int(asked[2]))
    end = min(int(asked[2]) + 1, len(data)) if asked[1] and asked[2] else len(data)
    headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
    return self.answer(206, data[start:end], **headers)

  def list(self, query: dict[str, str]) -> dict:
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
    names, folders = [], set()
    for name in sorted(n for n in self.server.objects if n.startswith(prefix)):
      head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
      if found:
        folders.add(prefix + head + delimiter)
      elif query.get("startOffset", "") <= name < query.get("endOffset", "\U0010ffff"):
        names.append(name)
    return {"items": [*map(self.describe, names)], "prefixes": sorted(folders)}


def generation(data: bytes) -> str:
  """A number that changes with the contents of an object."""
  return str(1 + zlib.crc32(data))
