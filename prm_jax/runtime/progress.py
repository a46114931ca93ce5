"""Progress of long work: tqdm's bar on a terminal, elsewhere a line of text every `SECONDS`."""

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator

import tqdm

SECONDS = 20  # between lines; shorter work prints none
LINE = "{desc}: {n_fmt}/{total_fmt} {unit} ({percentage:.0f}%){speed}{postfix}{still}"
BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{speed}{postfix}{still}]"


class Progress(tqdm.tqdm):
  """A tqdm bar of a known total; without a terminal, lines with done, rate and time left.

  The rate is the mean since the first update, which may compile.
  """

  def __init__(self, *args, **options):
    options |= {"bar_format": BAR}
    if not sys.stderr.isatty():
      options |= {"file": _Lines(), "bar_format": LINE, "leave": False}
      options |= {"mininterval": SECONDS, "delay": SECONDS, "miniters": 0}
    self._first: tuple[float, float] | None = None  # time of the first update, and `n` after it
    self._seconds_left, self._at_most = None, False
    super().__init__(*args, **options)

  def __iter__(self):
    """Yields the items; tqdm's own loop updates only when it prints, too late for the rate."""
    with self:
      for item in self.iterable:
        yield item
        self.update()

  def update(self, n: float = 1) -> bool | None:
    """Adds `n` to what is done; returns whether the bar was shown, as tqdm does."""
    if self._first is None and n > 0:
      self._first = time.monotonic(), self.n + n
    return super().update(n)

  def estimate(self, seconds_left: Callable[[int], float], at_most: bool = False) -> None:
    """Shows `seconds_left(done)` from now on, instead of an estimate from the rate."""
    self._seconds_left, self._at_most = seconds_left, at_most

  def left(self, done: int) -> str:
    """Returns the estimated time left at `done` of the total, as text."""
    text = self.format_interval(self._seconds_left(done))
    return f"at most {text}" if self._at_most else text

  @property
  def format_dict(self):
    """The fields of a bar's format, for tqdm; rate and time left are empty while not known."""
    values, speed, still = super().format_dict, "", ""
    began, before = self._first or (0.0, self.n)
    if self.n > before:
      rate = (self.n - before) / max(time.monotonic() - began, 1e-9)  # a second
      many = self.format_sizeof(rate) if values["unit_scale"] else f"{rate:.2f} "
      speed = f", {many}{values['unit']}/s" if rate >= 1 else f", {1 / rate:.2f} s each"
      still = self.format_interval((self.total - self.n) / rate) if self.total else ""
    if self._seconds_left:
      still = self.left(self.n)
    return values | {"speed": speed, "still": f", {still} left" if still else ""}

  def reach(self, done: float) -> None:
    """Moves to `done` of the total."""
    self.update(int(done) - self.n)

  def said(self) -> None:
    """Postpones the next line, as something has just been printed."""
    self.last_print_t = self._time()


class _Lines:
  """A file for tqdm that keeps the text of its bars and drops the movements of the cursor."""

  def write(self, text: str) -> None:
    if text := text.replace("\x1b[A", "").strip():
      with contextlib.suppress(BrokenPipeError):  # the work goes on without a reader
        print(text, file=sys.stderr, flush=True)

  def flush(self) -> None:
    pass


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
  """Prints `text` at once, and again every `SECONDS` with the time elapsed."""
  say = functools.partial(tqdm.tqdm.write, file=sys.stderr)  # beside a bar, if one is shown
  began, done = time.monotonic(), threading.Event()

  def remind() -> None:
    while not done.wait(SECONDS):
      elapsed = tqdm.tqdm.format_interval(time.monotonic() - began)
      say(f"{text}: {elapsed}")

  say(text)
  thread = threading.Thread(target=remind, daemon=True)
  thread.start()
  try:
    yield
  finally:
    done.set()
    thread.join()
