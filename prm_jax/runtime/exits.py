"""How a script ends: with 0, with an error in one line (1), or by a signal (130, 143, or 75).

After SIGINT the process dies of that signal, as shells expect: a loop around the script ends too.

A thread answers SIGINT and SIGTERM, so that the script stops at once even inside compiled code.  It
deletes the files that are not whole yet and ends the process: an exception would be swallowed by
libraries that take it for damage, and would leave threads of XLA running into Python's shutdown.

Imports nothing that takes time: scripts call `on_signals` before their other imports.
"""

import atexit
import contextlib
import ctypes
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator

AGAIN = os.EX_TEMPFAIL  # 75: start the job again
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM  # 130, 143, as of shells
LONGEST = 3000  # characters of an error

COMMAND = ""  # `prm-jax NAME`, where that started the script
UNFINISHED: set[pathlib.Path] = set()  # files and directories without their final names
COMMIT = threading.Lock()  # held while files take their final names, so that all do or none
_LEAVING, _HALTED = threading.Event(), threading.Event()
HALT = 0.2  # seconds given to the main thread; inside compiled code it does not halt, nor write


def on_signals(sigterm: int = TERMINATED, advice: str = "") -> None:
  """Makes SIGINT, SIGTERM and a missing package end this process with one line on standard error.

  Args:
    sigterm: the exit code after SIGTERM.
    advice: the end of the line.
  """
  sys.excepthook = _uncaught
  ends = {signal.SIGINT: ("Ctrl-C", INTERRUPTED), signal.SIGTERM: ("SIGTERM", sigterm)}
  read, write = os.pipe()
  os.set_blocking(write, False)
  with contextlib.suppress(ValueError):  # outside of the main thread
    for number in ends:
      if signal.getsignal(number) is not signal.SIG_IGN:  # as of a job in the background
        signal.signal(number, _noticed)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
  os.register_at_fork(after_in_child=lambda: _replace(signal.SIG_DFL))  # it has no such thread
  atexit.register(_replace, signal.SIG_IGN)  # runs last: a signal then must not fail a finished run

  def watch() -> None:
    while number := os.read(read, 1):
      if signal.getsignal(number[0]) is _noticed:  # else a handler of the run's own
        name, code = ends[number[0]]
        leave(number[0], f"stopped by {name}{advice}", code)

  threading.Thread(target=watch, name="signals", daemon=True).start()


def _uncaught(kind: type[BaseException], error: BaseException, trace) -> None:
  """The excepthook: for a package of one of the project's extras, what installs it."""
  if issubclass(kind, ModuleNotFoundError) and error.name:
    from prm_jax.runtime import doctor

    if extras := doctor.extras_with(error.name):
      how = f"pip install 'prm_jax[{extras[0]}]' (in a clone: '.[{extras[0]}]')"
      print(f"{script()}: {error}; {how}", file=sys.stderr)
      return
  sys.__excepthook__(kind, error, trace)


def _noticed(*_) -> None:
  """The signal handler.  The thread of `on_signals` does the work, while the main thread halts."""
  if _LEAVING.is_set():
    _HALTED.set()
    threading.Event().wait()


def _replace(handler: signal.Handlers) -> None:
  for number in (signal.SIGINT, signal.SIGTERM):
    if signal.getsignal(number) is _noticed:
      signal.set_wakeup_fd(-1)
      signal.signal(number, handler)


def leave(number: int, message: str, code: int) -> None:
  """Ends the process after signal `number`: deletes what is unfinished, and prints one line."""
  COMMIT.acquire()  # for good: nothing takes its final name any more
  try:
    _LEAVING.set()
    signal.pthread_kill(threading.main_thread().ident, number)
    _HALTED.wait(HALT)  # it would put new files into what is deleted
    for path in list(UNFINISHED):
      shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    end = "\n" if sys.stderr.isatty() else ""  # of a progress bar
    os.write(2, f"{end}{script()}: {message}\n".encode(errors="replace"))
  finally:
    if number == signal.SIGINT:  # only the main thread may call Python's function
      ctypes.CDLL(None).signal(signal.SIGINT, ctypes.c_void_p(int(signal.SIG_DFL)))
      os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def script() -> str:
  """The script's name, which begins its messages."""
  return COMMAND or pathlib.Path(sys.argv[0]).name


def run(main: Callable[[], None]) -> None:
  """Calls a script's `main`; an error of its input or its machine becomes one line and exit code 1.

  Other exceptions, which are mistakes in the code, keep their tracebacks.
  """
  try:
    main()
    sys.stdout.flush()
  except BrokenPipeError:  # such as `| head`; a second attempt at shutdown would print a traceback
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(1)
  except (ValueError, OSError, RuntimeError, MemoryError) as error:
    text = str(error) or type(error).__name__
    raise SystemExit(f"{script()}: {text[:LONGEST]}") from error


@contextlib.contextmanager
def scratch_directory() -> Iterator[pathlib.Path]:
  """A temporary directory, which a signal deletes too."""
  with tempfile.TemporaryDirectory() as name:
    UNFINISHED.add(path := pathlib.Path(name))
    try:
      yield path
    finally:
      UNFINISHED.discard(path)
