"""Exit codes of scripts: 0; 1 after a one-line error; 2 for a wrong flag; 130, 143, 75 by signal.

After SIGINT the process dies of that signal, as shells expect: a loop around the script ends too.

A thread handles SIGINT and SIGTERM, so that the script stops at once even inside compiled code.  It
deletes unfinished files and ends the process.  An exception would not do: libraries would mistake
it for damage and swallow it, and XLA's threads would run into Python's shutdown.

Scripts call `on_signals` before their other imports, so this module imports nothing slow.
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

# 75, a temporary failure: start the job again.  To systemd and others, 143 is an intended stop.
AGAIN = os.EX_TEMPFAIL
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM  # 130, 143, as in shells
RESUME = "; run the same command again to resume"
LONGEST = 3000  # characters of an error message
EXPECTED = ValueError, OSError, RuntimeError, MemoryError  # of input or machine; others are bugs

COMMAND = ""  # `prm-jax NAME`, if that started the script
UNFINISHED: set[pathlib.Path] = set()  # files and directories without their final names
COMMIT = threading.Lock()  # held while files are renamed, so that either all are or none
_LEAVING, _HALTED = threading.Event(), threading.Event()
HALT = 0.2  # seconds for the main thread to halt; in compiled code it neither halts nor writes


class Preempted(BaseException):  # like KeyboardInterrupt, it passes `except Exception`
  """The run received SIGTERM and has saved its state."""


def on_signals(resumable: bool = False) -> None:
  """Makes SIGINT, SIGTERM and a missing package end this process with one line on standard error.

  Args:
    resumable: the line says how to resume, and the exit code after SIGTERM is `AGAIN`.
  """
  for name, number in (("stdout", 1), ("stderr", 2)):
    if getattr(sys, name) is None:  # closed by the caller: no output file may get its number
      os.dup2(null := os.open(os.devnull, os.O_WRONLY), number)
      if null != number:
        os.close(null)
      setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115
  sys.excepthook = _uncaught
  advice, sigterm = (RESUME, AGAIN) if resumable else ("", TERMINATED)
  ends = {signal.SIGINT: ("Ctrl-C", INTERRUPTED), signal.SIGTERM: ("SIGTERM", sigterm)}
  read, write = os.pipe()
  os.set_blocking(write, False)
  with contextlib.suppress(ValueError):  # outside of the main thread
    for number in ends:
      if signal.getsignal(number) is not signal.SIG_IGN:  # a background job ignores them
        signal.signal(number, _noticed)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
  os.register_at_fork(after_in_child=lambda: _replace(signal.SIG_DFL))  # a child has no such thread
  atexit.register(_replace, signal.SIG_IGN)  # runs last: a signal then must not fail a finished run

  def watch() -> None:
    while number := os.read(read, 1):
      if signal.getsignal(number[0]) is _noticed:  # else the run has its own handler
        name, code = ends[number[0]]
        leave(number[0], f"stopped by {name}{advice}", code)

  threading.Thread(target=watch, name="signals", daemon=True).start()


def _uncaught(kind: type[BaseException], error: BaseException, trace) -> None:
  """The excepthook: for a missing package of an extra, prints the command that installs it."""
  if issubclass(kind, ModuleNotFoundError) and error.name:
    from prm_jax.runtime import doctor

    if extras := doctor.extras_with(error.name):
      how = f"pip install 'prm_jax[{extras[0]}]' (in a clone: '.[{extras[0]}]')"
      print(f"{script()}: {error}; {how}", file=sys.stderr)
      return
  sys.__excepthook__(kind, error, trace)


def _noticed(*_) -> None:
  """The signal handler: halts the main thread while the thread of `on_signals` does the work."""
  if _LEAVING.is_set():
    _HALTED.set()
    threading.Event().wait()


def _replace(handler: signal.Handlers) -> None:
  for number in (signal.SIGINT, signal.SIGTERM):
    if signal.getsignal(number) is _noticed:
      signal.set_wakeup_fd(-1)
      signal.signal(number, handler)


def leave(number: int, message: str, code: int) -> None:
  """Ends the process after signal `number`: deletes unfinished files, and prints one line."""
  COMMIT.acquire()  # never released, so that no file takes its final name from now on
  try:
    _LEAVING.set()
    signal.pthread_kill(threading.main_thread().ident, number)
    _HALTED.wait(HALT)  # a running main thread could put new files into a deleted directory
    for path in list(UNFINISHED):
      delete(path)
    end = "\n" if sys.stderr.isatty() else ""  # ends a progress bar
    os.write(2, f"{end}{script()}: {message}\n".encode(errors="replace"))
  finally:
    if number == signal.SIGINT:  # Python's signal.signal works in the main thread only
      ctypes.CDLL(None).signal(signal.SIGINT, ctypes.c_void_p(int(signal.SIG_DFL)))
      os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def delete(path: pathlib.Path) -> None:
  """Deletes a file or a directory, if it exists."""
  shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def script() -> str:
  """Returns the script's name, which begins its messages."""
  return COMMAND or pathlib.Path(sys.argv[0]).name


def run(main: Callable[[], None]) -> None:
  """Calls a script's `main`; an error of input or machine becomes one line and exit code 1.

  A preempted run ends with one line and `AGAIN`.  Other exceptions are bugs, and keep their
  tracebacks.
  """
  try:
    main()
    if sys.stdout:  # None if the caller closed it
      sys.stdout.flush()
  except BrokenPipeError:  # as by `| head`; writing again at shutdown would print a traceback
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(1)
  except Preempted as stop:
    try:
      print(f"{script()}: {stop}{RESUME}", file=sys.stderr, flush=True)
    except OSError:  # the signal may have ended the reader too, as in `2>&1 | tee log`
      os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # or the exit code would be Python's 120
    sys.exit(AGAIN)
  except EXPECTED as error:
    text = str(error) or type(error).__name__
    raise SystemExit(f"{script()}: {text[:LONGEST]}") from error


@contextlib.contextmanager
def scratch_directory() -> Iterator[pathlib.Path]:
  """Yields a temporary directory, which a signal deletes too."""
  with tempfile.TemporaryDirectory() as name:
    UNFINISHED.add(path := pathlib.Path(name))
    try:
      yield path
    finally:
      UNFINISHED.discard(path)
