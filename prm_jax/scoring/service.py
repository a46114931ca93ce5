"""A reward model behind HTTP: `POST /score`, `POST /rewards` and `GET /health`.

Requests come from the network, so `Limits` bounds the size and time of each request, and the memory
that all requests hold.  Solutions are encoded before they are queued, so that one that cannot be
scored fails only its own request.  `Service.app` lists the routes.
"""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import logging
import resource
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Any

import msgspec
from aiohttp import web

from prm_jax.runtime import json_lines
from prm_jax.scoring import candidates, rewards
from prm_jax.scoring.rater import MAX_TOKENS, Rater, Solution, SolutionError
from prm_jax.scoring.request_queue import Refused, RequestQueue
from prm_jax.scoring.reward_function import RewardFunction

BACKLOG = 2048  # connections that wait in the operating system to be accepted
IDLE = 75.0  # seconds after which a connection without a request is closed
LINGER = 2.0  # seconds for the rest of a body that is refused, or arrives while the service stops


@dataclasses.dataclass(frozen=True)
class Limits:
  """Bounds of one request, and of the memory that unanswered requests hold together."""

  body_bytes: int = 4 * 2**20
  solutions: int = 256
  steps: int = 16_384  # of all solutions of a request: the answer has numbers for each
  characters: int = 2**18  # of a solution, before it is encoded: far more than MAX_TOKENS have
  seconds: float = 30.0  # to receive a body, and to send an answer
  held_bytes: int = 64 * 2**20  # of bodies
  held_solutions: int = 16_384
  held_tokens: int = 256 * MAX_TOKENS  # as many as one request may have


class Asked(msgspec.Struct):
  """A solution of a request; other keys are skipped."""

  problem: str
  steps: list[str] | msgspec.UnsetType = msgspec.UNSET
  text: str | msgspec.UnsetType = msgspec.UNSET


class Request(msgspec.Struct, forbid_unknown_fields=True):
  """The body of POST /score."""

  solutions: Annotated[list[Asked], msgspec.Meta(min_length=1)]


class Part(msgspec.Struct):
  """A part of a message's content."""

  type: str
  text: str = ""


class Message(msgspec.Struct):
  role: str
  content: str | list[Part] | None = None


Texts = Annotated[list[str | list[Message]], msgspec.Meta(min_length=1)]  # or chats


class RewardRequest(msgspec.Struct, forbid_unknown_fields=True):
  """The body of POST /rewards: a `RewardFunction`'s arguments and fields."""

  prompts: Texts
  completions: Texts
  form: str = "product"
  temperature: float = rewards.TEMPERATURE
  separator: str = ""


Hold = Callable[[str, int], None]  # counts bytes, solutions or tokens as held by a request
Work = Callable[[bytes, Hold], Awaitable[dict[str, Any]]]  # answers a body


class Service:
  """An HTTP server of one model.  `serve` runs it; `stop` ends it from any thread."""

  def __init__(self, scorer: Rater, name: str, limits: Limits | None = None):
    self.name, self.limits = name, limits or Limits()
    self.scorer, self.queue = scorer, RequestQueue(scorer)
    self.held: collections.Counter[str] = collections.Counter()
    self.served: collections.Counter[str] = collections.Counter()
    self.address: tuple[str, int] | None = None  # None: not serving yet
    self._under_way, self._stopping = 0, False
    self._deadlines: set[asyncio.Timeout] = set()  # of bodies that are still arriving

  async def serve(self, listener: socket.socket) -> None:
    """Answers requests until `stop` or, in the main thread, SIGTERM or SIGINT.

    Prints the URL when it is ready.  It answers all accepted requests before it returns.
    """
    self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
    self.queue.warm_up()
    _allow_connections()
    # Errors of clients are answered, not logged.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    # With handler_cancellation, a request whose client has gone away is no longer scored.
    runner = web.AppRunner(
      self.app(),
      access_log=None,
      handler_cancellation=True,
      auto_decompress=False,
      keepalive_timeout=IDLE,
      lingering_time=LINGER,
      shutdown_timeout=LINGER,  # after all requests have been answered
    )
    await runner.setup()
    site = web.SockSite(runner, listener, backlog=BACKLOG)
    await site.start()
    reading = asyncio.create_task(self.queue.run())
    reading.add_done_callback(lambda task: self._stop.set())
    self.address = listener.getsockname()[:2]
    host = f"[{self.address[0]}]" if ":" in self.address[0] else self.address[0]
    self._catch_signals()
    print(f"serving {self.name} on http://{host}:{self.address[1]}", flush=True)
    await self._stop.wait()
    self._stopping = True
    await site.stop()
    for deadline in self._deadlines:
      if not deadline.expired():
        deadline.reschedule(min(deadline.when(), self._loop.time() + LINGER))
    while self._under_way and not reading.done():
      await asyncio.sleep(0.01)
    await runner.cleanup()
    self.queue.close()
    if reading.done():
      reading.result()  # raises the exception that ended it
    reading.cancel()
    print(f"stopped after {self.served['solutions']:,} solutions", file=sys.stderr, flush=True)

  def stop(self) -> None:
    """Makes `serve` refuse new requests, and return when all others are answered."""
    self._loop.call_soon_threadsafe(self._stop.set)

  def _catch_signals(self) -> None:
    """Makes SIGTERM or SIGINT stop the service; a second signal ends the process at once."""
    numbers = (signal.SIGTERM, signal.SIGINT)

    def stop() -> None:
      print(f"finishing {self._under_way} requests", file=sys.stderr, flush=True)
      for each in numbers:
        self._loop.remove_signal_handler(each)
        signal.signal(each, signal.SIG_DFL)
      self._stop.set()

    if threading.current_thread() is threading.main_thread():
      for number in numbers:
        self._loop.add_signal_handler(number, stop)

  def app(self) -> web.Application:
    """Returns the application with its routes."""
    app = web.Application(middlewares=[_errors_as_json])
    app.router.add_get("/health", self._health)
    app.router.add_post("/score", functools.partial(self._post, self.score))
    app.router.add_post("/rewards", functools.partial(self._post, self.rewards))
    return app

  async def score(self, body: bytes, hold: Hold) -> dict[str, Any]:
    """Returns the answer of POST /score."""
    split, solutions = await self.queue.in_encoder(self._solutions, body)
    trees = await self._encoded(solutions, hold)
    if bad := next((tree for tree in trees if isinstance(tree, SolutionError)), None):
      raise Refused(400, f"solutions[{bad.index}]: {bad}")
    read = await self.queue.read(trees, [problem for problem, _ in solutions])
    scores = []
    for was_split, (_, steps), probabilities in zip(split, solutions, read):
      scored = candidates.scored({}, steps, probabilities, self.scorer.contract)
      if not was_split:  # the client knows the steps that it sent
        del scored["steps"]
      scores.append(scored)
    self.served["solutions"] += len(scores)
    return {"scores": scores}

  def _solutions(self, body: bytes) -> tuple[list[bool], list[Solution]]:
    """Returns, for each solution of a body, whether its text was split; and the solutions.

    Raises:
      Refused, BadLine: the body is wrong; the message says where.
    """
    asked = json_lines.decode_known(body, Request, "the body").solutions
    if len(asked) > self.limits.solutions:
      raise Refused(400, f"{len(asked):,} solutions; at most {self.limits.solutions:,} at a time")
    separator = self.scorer.contract.separator
    solutions = [
      candidates.solution(msgspec.to_builtins(each), separator, f"solutions[{i}]")
      for i, each in enumerate(asked)
    ]
    return [each.steps is msgspec.UNSET for each in asked], solutions

  async def rewards(self, body: bytes, hold: Hold) -> dict[str, Any]:
    """Returns the answer of POST /rewards: a `RewardFunction`'s rewards, in sum and by step."""
    function, solutions, places = await self.queue.in_encoder(self._completions, body)
    encoded = await self._encoded(solutions, hold)
    refused = [tree for tree in encoded if isinstance(tree, SolutionError)]
    trees = {i: tree for i, tree in enumerate(encoded) if not isinstance(tree, SolutionError)}
    if refused and not trees:
      print(f"warning: no completion of a request has a score: {refused[0]}", file=sys.stderr)
    read = await self.queue.read([*trees.values()], [solutions[i][0] for i in trees])
    steps = await self.queue.in_encoder(function.placed, dict(zip(trees, read)), places)
    self.served["solutions"] += len(solutions)
    return {"rewards": function.sums(steps), "steps": [each._asdict() for each in steps]}

  def _completions(self, body: bytes) -> tuple[RewardFunction, list, list[list[int]]]:
    """Returns the function of a body, its solutions, and where their steps end.

    Raises:
      Refused, BadLine: the body is wrong; the message says where.
    """
    asked = json_lines.decode_known(body, RewardRequest, "the body")
    if len(asked.prompts) > self.limits.solutions:
      raise Refused(400, f"{len(asked.prompts):,} prompts; at most {self.limits.solutions:,}")
    try:
      function = RewardFunction(self.scorer, asked.form, asked.temperature, asked.separator)
      prompts, completions = msgspec.to_builtins((asked.prompts, asked.completions))
      return function, *function.solutions(prompts, completions)
    except ValueError as error:
      raise Refused(400, str(error)) from None

  async def _encoded(self, solutions: list[Solution], hold: Hold) -> list:
    """Counts solutions as held and returns `RequestQueue.encode` of them.

    Raises:
      Refused: there are too many steps, or the queue is full.
    """
    hold("solutions", len(solutions))
    # A solution of more steps has too many tokens, and is refused alone.
    counts = [len(steps) for _, steps in solutions if len(steps) <= MAX_TOKENS]
    if (count := sum(counts)) > (most := self.limits.steps):
      raise Refused(400, f"{count:,} steps; at most {most:,} at a time")
    on_tokens = functools.partial(hold, "tokens")
    return await self.queue.encode(solutions, self.limits.characters, on_tokens)

  async def _post(self, work: Work, request: web.Request) -> web.Response:
    """Reads the body, computes its answer and sends it."""
    if self._stopping:
      raise Refused(503, "the service is being stopped")
    self._under_way += 1
    try:
      with self._holding() as hold:
        answer = await work(await self._body(request, hold), hold)
        response = web.Response(body=msgspec.json.encode(answer), content_type="application/json")
        await self._send(request, response)
    finally:
      self._under_way -= 1
    self.served["requests"] += 1
    return response

  @contextlib.contextmanager
  def _holding(self) -> Iterator[Hold]:
    """Counts the bytes, solutions and tokens that a request holds until the block ends.

    Yields:
      A function that counts more as held, and raises Refused if all requests then hold too much.
    """
    own: collections.Counter[str] = collections.Counter()

    def hold(unit: str, count: int) -> None:
      if self.held[unit] + count > getattr(self.limits, f"held_{unit}"):
        raise Refused(503, f"the queue is full of {unit}: {self.held[unit]:,}; try again")
      self.held[unit] += count
      own[unit] += count

    try:
      yield hold
    finally:
      self.held.subtract(own)

  async def _body(self, request: web.Request, hold: Hold) -> bytes:
    """Reads the body, and counts it while it arrives: a client may claim any length, or none."""
    if encoding := request.headers.get("Content-Encoding"):
      raise Refused(415, f"Content-Encoding is {json_lines.show(encoding)}: send plain JSON")
    most, body = self.limits.body_bytes, bytearray()
    too_large = Refused(413, f"the body has over {most:,} bytes: send fewer solutions at a time")
    if (request.content_length or 0) > most:
      raise too_large
    try:
      async with asyncio.timeout(self.limits.seconds) as deadline:
        self._deadlines.add(deadline)
        async for part in request.content.iter_any():
          if len(body) + len(part) > most:
            raise too_large
          hold("bytes", len(part))
          body += part
    except TimeoutError:
      raise Refused(408, "the body has not arrived in time") from None
    except web.RequestPayloadError as error:
      raise Refused(400, f"the body is broken: {error}") from None
    finally:
      self._deadlines.discard(deadline)
    return bytes(body)

  async def _send(self, request: web.Request, response: web.Response) -> None:
    """Sends the response; a client that reads nothing times out.

    Meanwhile the request counts as held.
    """
    try:
      async with asyncio.timeout(self.limits.seconds):
        await response.prepare(request)
        await response.write_eof()
    except TimeoutError:
      if request.transport:
        request.transport.abort()

  async def _health(self, request: web.Request) -> web.Response:
    return web.json_response(
      {
        "status": "ok",
        "model": self.name,
        "step": self.scorer.step,
        "contract": dataclasses.asdict(self.scorer.contract),
        "queued": {unit: self.held[unit] for unit in ("bytes", "solutions", "tokens")},
        "served": {unit: self.served[unit] for unit in ("requests", "solutions")},
      }
    )


@web.middleware
async def _errors_as_json(request: web.Request, handler: Callable) -> web.StreamResponse:
  """Returns the handler's response; an error becomes {"error": ...} with its status."""
  headers = {}
  try:
    return await handler(request)
  except Refused as error:
    status, message = error.status, str(error)
    headers = {"Retry-After": "1"} if status == 503 else {}
  except json_lines.BadLine as error:
    status, message = 400, str(error)
  except web.HTTPException as error:  # of the router: 404, 405
    asked = f"{request.method} {json_lines.show(request.path)}"
    message = f"{asked}: {error.reason}; there are POST /score, POST /rewards and GET /health"
    status = error.status
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
  except ConnectionError:
    raise
  except Exception:
    traceback.print_exc(file=sys.stderr)
    status, message = 500, "an error in the server; its log has the traceback"
  return web.json_response({"error": message}, status=status, headers=headers)


def _allow_connections() -> None:
  """Raises this process's limit of open files, often 1,024: each connection is a file."""
  _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  with contextlib.suppress(ValueError):  # some systems allow fewer than their limit says
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def listen(host: str, port: int) -> socket.socket:
  """Returns a socket bound to an address, port 0 being any free one; OSError if that fails."""
  listener = None
  try:
    family, kind, protocol, _, address = socket.getaddrinfo(
      host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
  except OSError as error:
    if listener:
      listener.close()
    raise OSError(f"--host={host} --port={port}: {error.strerror}") from error
  return listener
