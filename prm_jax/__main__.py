"""One command for all scripts.

  prm-jax COMMAND [FLAGS]      is python scripts/COMMAND.py [FLAGS]
  prm-jax COMMAND --help       what it does, and its flags
  prm-jax --version            of the installed project
  prm-jax doctor               what is installed, which devices there are, what is missing for what
  prm-jax completion bash      completion of commands and flags, also for zsh: write it to a file,
                               and have your .bashrc source that

Commands, with `-` or `_`:
"""

import ast
import pathlib
import runpy
import sys

import prm_jax
from prm_jax.runtime import exits

PACKAGE = pathlib.Path(__file__).parent
CHECKOUT = (PACKAGE.parent / "setup.py").exists()


def scripts() -> dict[str, pathlib.Path]:
  """The scripts by command: of the checkout, or those that were installed with the package."""
  folder = (PACKAGE.parent if CHECKOUT else PACKAGE) / "scripts"
  found = {path.stem: path for path in sorted(folder.glob("[a-z]*.py"))}
  if not CHECKOUT:
    found.pop("benchmark", None)  # its modules are not installed
  return found


def purpose(script: pathlib.Path) -> str:
  """The first sentence of a script's docstring, which is not run for it."""
  return " ".join((ast.get_docstring(ast.parse(script.read_text())) or "").split("\n\n")[0].split())


def main() -> None:
  """Runs the command of the command line; SystemExit, naming the nearest, if there is none."""
  name, *rest = sys.argv[1:] or ["--help"]
  known, exits.COMMAND = scripts(), "prm-jax"
  if name in ("-h", "--help"):
    print(__doc__)
    print("\n".join(f"  {each:16} {purpose(path)}" for each, path in known.items()))
  elif name == "--version":
    print(f"prm_jax {prm_jax.__version__}")
  elif name == "doctor":
    from prm_jax.runtime import doctor

    print(doctor.report())
  elif name == "completion":
    from prm_jax.runtime import completion

    print(completion.shell(rest[0] if rest else "bash", known))
  elif (command := name.replace("-", "_")) in known:
    exits.COMMAND, sys.argv = f"prm-jax {command}", [command, *rest]
    runpy.run_path(str(known[command]), run_name="__main__")
  else:
    import difflib

    near = difflib.get_close_matches(command, known, n=1, cutoff=0)
    raise SystemExit(f"prm-jax: there is no {name}; did you mean {near[0]}?  --help lists all")


def run() -> None:
  """The entry point: an error of the input or the installation is one line."""
  exits.run(main)


if __name__ == "__main__":
  run()
