"""An engine behind a server with OpenAI's API, completions or chat (vLLM, SGLang, TPU engines).

Each request asks for one sample with a seed of its own: servers differ in what `n` and `seed` mean
together, and they detect shared prompts themselves.  urllib3's `Retry` repeats a request after a
transient error.  The engine reports once how a server's answers deviate from its requests; no
answer shows whether the server ignores a seed or top-k.

With a tokenizer the engine sends the tokens of `prompts.encode`.  Without one it sends a text: the
server then reads a special token that a problem spells out as the token itself, and may add a BOS
token to a template that has one.  In a chat the text is the only message, and the server applies
the template.
"""

import collections
import dataclasses
import itertools
import json
import logging
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import msgspec
import urllib3

from prm_jax.generation import prompts as prompts_lib
from prm_jax.generation.engines import Completion, Limits, Prompt, PromptError, derived_seed
from prm_jax.generation.sampling import Sampling
from prm_jax.input_pipeline.tokenizers import Tokenizer
from prm_jax.runtime import json_lines

MAX_BYTES = 64 * 2**20  # of an answer
TRANSIENT = (408, 429, *range(500, 600))  # status codes after which a request is repeated
PAUSE = 60.0  # seconds at most between two attempts, whatever the server asks for


logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # else a line per retry


class Retry(urllib3.Retry):
  """A retry policy that limits the pauses that a server asks for, and reports retries."""

  say: Callable[[str], None] = staticmethod(lambda text: None)

  def new(self, **changes: Any) -> Self:
    following = super().new(**changes)
    following.say = self.say
    return following

  def increment(self, *args: Any, **given: Any) -> Self:
    following = super().increment(*args, **given)  # raises after the last one
    response = given.get("response")
    if isinstance(given.get("error"), urllib3.exceptions.ReadTimeoutError):
      why = "no answer in time (fewer requests at once may help)"
    else:
      why = f"status {response.status}" if response else "no connection, or a broken one"
    self.say(f"{why}: retrying, with growing pauses")
    return following

  def get_retry_after(self, response: urllib3.BaseHTTPResponse) -> float | None:
    try:
      seconds = super().get_retry_after(response)
    except (urllib3.exceptions.InvalidHeader, ValueError, OverflowError):  # "1.5", a year 99999
      return None
    return None if seconds is None else min(seconds, PAUSE)


class LogProbs(msgspec.Struct):
  token_logprobs: list[float | None] | None = None


class Message(msgspec.Struct):
  content: str | None = None  # null: cut off before the answer, or refused
  reasoning: str | None = None  # the thinking, which the server's parser cut out of the content
  reasoning_content: str | None = None  # the same from older servers, and from others


class Choice(msgspec.Struct):
  text: str | None = None
  message: Message | None = None  # of a chat; `text` becomes thinking and answer, as written
  finish_reason: str | None = None
  stop_reason: str | int | None = None  # the stop string, from vLLM
  matched_stop: str | int | None = None  # the same from SGLang
  logprobs: LogProbs | None = None

  def __post_init__(self):
    if self.message:
      thinking = self.message.reasoning or self.message.reasoning_content
      before = f"<think>\n{thinking}\n</think>\n" if thinking else ""
      self.text = before + (self.message.content or "")
    if self.text is None:
      raise ValueError('no "text" and no "message"')


class Usage(msgspec.Struct):
  completion_tokens: int | None = None


class Answer(msgspec.Struct):
  choices: list[Choice]
  usage: Usage | None = None


@dataclasses.dataclass
class Server:
  """An engine behind a URL, such as http://127.0.0.1:8000/v1."""

  url: str
  model: str  # as the server names it
  concurrency: int = 64  # requests at once
  key: str = ""  # of the API
  tokenizer: Tokenizer | None = None  # of the model; a chat needs none
  chat: bool = False  # whether to ask for chat completions
  retries: int = 8
  seconds: float = 600.0  # read timeout of a request
  said: set[str] = dataclasses.field(default_factory=set)  # deviations that were reported

  def facts(self) -> dict[str, Any]:
    """Implements `Engine.facts`; the weights behind the model's name are unknown."""
    return {
      "url": self.url,
      "served_model": self.model,
      "chat": self.chat,
      "tokenizer": self.tokenizer.hash if self.tokenizer else None,
    }

  def generate(
    self, prompts: Sequence[Prompt], n: int, sampling: Sampling, limits: Limits
  ) -> Iterator[Completion]:
    """Implements `Engine.generate`.

    Raises:
      PromptError: the server refuses a prompt, or its answer is not a completion.  It is raised
        after the completions of the other prompts, or as soon as `concurrency` prompts in a row
        are refused, as with a wrong model or key.
      OSError: the server cannot be reached, after all retries.
    """
    timeout = urllib3.Timeout(connect=10, read=self.seconds)
    pool = urllib3.PoolManager(maxsize=self.concurrency, timeout=timeout)
    jobs = collections.deque(itertools.product(range(len(prompts)), range(n)))
    results: queue.SimpleQueue[tuple[int, Completion | Exception | None]] = queue.SimpleQueue()
    refused: dict[int, str] = {}  # reasons by prompt; its other samples are not requested

    def work() -> None:
      while True:
        try:
          i, k = jobs.popleft()
        except IndexError:
          return
        try:
          given = (pool, prompts[i], i, k, sampling, limits)
          result = None if i in refused else self._completion(*given)
        except Exception as error:
          result = error
        results.put((i, result))

    count = len(jobs)
    in_a_row: set[int] = set()  # prompts that were refused since the last completion
    try:
      # Daemon threads: after an error, the process does not wait for their requests.
      for _ in range(min(self.concurrency, count)):
        threading.Thread(target=work, daemon=True).start()
      for _ in range(count):
        i, result = results.get()
        if isinstance(result, Completion):
          in_a_row.clear()
          yield result
        elif isinstance(result, ValueError):
          refused.setdefault(i, str(result))
          in_a_row.add(i)
          if len(in_a_row) >= self.concurrency:
            break
        elif result:
          raise result
      if refused:
        raise PromptError(refused)
    finally:
      jobs.clear()
      pool.clear()

  def _completion(
    self,
    pool: urllib3.PoolManager,
    prompt: Prompt,
    i: int,
    k: int,
    sampling: Sampling,
    limits: Limits,
  ) -> Completion:
    path, asked = self._form(prompt)
    body = asked | {
      "model": self.model,
      "n": 1,
      "max_tokens": limits.max_new_tokens,
      "temperature": sampling.temperature,
      "top_p": sampling.top_p,
      "seed": derived_seed(prompt.seed, k),
    }
    if limits.stop:
      body |= {"stop": [*limits.stop], "include_stop_str_in_output": True}
    # Parameters of vLLM and SGLang that OpenAI's API lacks.
    body |= {"top_k": sampling.top_k} if sampling.top_k else {}
    body |= {"min_p": sampling.min_p} if sampling.min_p else {}
    answer = self._ask(pool, path, body)
    if len(answer.choices) != 1:
      raise ValueError(f"{self.url}: {len(answer.choices)} choices for n=1")
    return self._read(answer, i, k, limits)

  def _form(self, prompt: Prompt) -> tuple[str, dict[str, Any]]:
    """Returns path and request fields of the API: completions or chat."""
    if self.chat:
      messages = [{"role": "user", "content": prompt.text}]
      return "chat/completions", {"messages": messages}
    asked = prompts_lib.encode(prompt, self.tokenizer) if self.tokenizer else prompt.text
    return "completions", {"prompt": asked, "logprobs": 0}

  def _ask(self, pool: urllib3.PoolManager, path: str, body: dict[str, Any]) -> Answer:
    url = f"{self.url.rstrip('/')}/{path}"
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
    retry = Retry(
      self.retries,
      backoff_factor=0.5,
      backoff_jitter=0.5,
      backoff_max=PAUSE,
      status_forcelist=TRANSIENT,
      allowed_methods=None,
      raise_on_status=False,
    )
    retry.say = self._say
    try:
      response, data = _request(pool, url, json.dumps(body).encode(), headers, retry)
    except urllib3.exceptions.HTTPError as error:
      raise OSError(f"{url}: no answer after {self.retries} retries: {error}") from error
    if response.status != 200:
      shown = json_lines.show(data[:300].decode(errors="replace"), 300)
      raise ValueError(f"{url}: status {response.status}: {shown}")
    if len(data) > MAX_BYTES:
      raise ValueError(f"{url}: an answer of more than {MAX_BYTES} bytes")
    return json_lines.convert(json_lines.parse(data, url), Answer, url)

  def _read(self, answer: Answer, i: int, k: int, limits: Limits) -> Completion:
    (choice,) = answer.choices
    text, end = choice.text, "stop" if choice.finish_reason == "stop" else "length"
    if choice.finish_reason not in ("stop", "length"):
      self._say(f"finish_reason is {choice.finish_reason!r}: treated as cut off")
    stop_end = limits.stop_end(text)
    reason = choice.stop_reason or choice.matched_stop
    if end == "stop" and reason in limits.stop and not stop_end:
      self._say("leaves stop strings out of the text: added here")
      text += reason
    log_probs = choice.logprobs.token_logprobs if choice.logprobs else None
    if not log_probs or None in log_probs:
      log_probs = None
    if log_probs is None and not self.chat:
      self._say("gives no log-probabilities")
    count = (answer.usage and answer.usage.completion_tokens) or len(log_probs or ())
    if not count:
      self._say("does not say how many tokens a completion has")
    if stop_end:
      end = "stop"
      if stop_end < len(text):
        self._say("text goes on after a stop string: cut here, so it has no log-probability")
        text, log_probs = text[:stop_end], None  # they are for the whole text
    return Completion(i, k, text, end, None, log_probs and tuple(log_probs), count)

  def _say(self, text: str) -> None:
    """Reports a deviation of the server from its requests, once."""
    if text not in self.said:
      self.said.add(text)
      print(f"{self.url}: {text}", file=sys.stderr, flush=True)


def _request(
  pool: urllib3.PoolManager, url: str, body: bytes, headers: dict[str, str], retry: Retry
) -> tuple[urllib3.BaseHTTPResponse, bytes]:
  """Returns the response and its body; retries if the body breaks off, which urllib3 does not."""
  while True:
    response = pool.request(
      "POST", url, body=body, headers=headers, retries=retry, preload_content=False
    )
    try:
      data = response.read(MAX_BYTES + 1)
      response.release_conn()
      return response, data
    except urllib3.exceptions.HTTPError as error:
      response.close()
      retry = (response.retries or retry).increment("POST", url, error=error)
      retry.sleep()
