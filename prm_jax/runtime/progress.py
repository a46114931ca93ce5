"""Progress of long work: tqdm's bar on a terminal, elsewhere a line of text now and then."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

import tqdm

SECONDS = 20  # from one line to the next; work that takes less prints none
LINE = (
  "{desc}: {n_fmt}/{total_fmt} {unit} ({percentage:.0f}%), {rate_fmt}, {remaining} left{postfix}"
)


class Progress(tqdm.tqdm):
  """`tqdm.tqdm` of a known total.  In a log or a pod it prints done, rate and time left."""

  def __init__(self, *args, **options):
    if not sys.stderr.isatty():
      options |= {"file": _Lines(), "bar_format": LINE, "leave": False}
      options |= {"mininterval": SECONDS, "delay": SECONDS, "miniters": 0}
    super().__init__(*args, **options)

  def reach(self, done: float) -> None:
    """Moves to `done` of the total."""
    self.update(int(done) - self.n)

  def said(self) -> None:
    """Puts the next line off: something has just been printed."""
    self.last_print_t = self._time()


class _Lines:
  """A file for tqdm that keeps the text of its bars and drops the movements of the cursor."""

  def write(self, text: str) -> None:
    if text := text.replace("\x1b[A", "").strip():
      print(text, file=sys.stderr, flush=True)

  def flush(self) -> None:
    pass


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
  """Says what takes its time, and now and then how long it has taken."""
  began, done = time.monotonic(), threading.Event()

  def remind() -> None:
    while not done.wait(SECONDS):
      elapsed = tqdm.tqdm.format_interval(time.monotonic() - began)
      print(f"{text}: {elapsed}", file=sys.stderr, flush=True)

  print(text, file=sys.stderr, flush=True)
  thread = threading.Thread(target=remind, daemon=True)
  thread.start()
  try:
    yield
  finally:
    done.set()
    thread.join()
