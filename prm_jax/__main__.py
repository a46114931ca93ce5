"""One command for all scripts.

  prm-jax COMMAND [FLAGS]      is python scripts/COMMAND.py [FLAGS]
  prm-jax COMMAND --help       what it does, and its flags
  prm-jax --version            the version of the installed project
  prm-jax doctor               installed packages, devices, and the packages that each extra lacks
  prm-jax completion bash      completion of commands and flags, also for zsh: write it to a file
                               that your .bashrc sources

Commands, with `-` or `_`:
"""

import ast
import pathlib
import runpy
import sys

import prm_jax
from prm_jax.runtime import exits

PACKAGE = pathlib.Path(__file__).parent
CHECKOUT = (PACKAGE.parent / "scripts" / "train.py").exists()


def scripts() -> dict[str, pathlib.Path]:
  """Returns the scripts by command, from the checkout or as installed with the package."""
  folder = (PACKAGE.parent if CHECKOUT else PACKAGE) / "scripts"
  commands = {path.stem: path for path in sorted(folder.glob("[a-z]*.py"))}
  if not CHECKOUT:
    commands.pop("benchmark", None)  # its modules are not installed
  return commands


def purpose(script: pathlib.Path) -> str:
  """Returns the first paragraph of a script's docstring, without running the script."""
  return " ".join((ast.get_docstring(ast.parse(script.read_text())) or "").split("\n\n")[0].split())


def main() -> None:
  """Runs the command of the command line; an unknown one raises SystemExit naming the nearest."""
  name, *rest = sys.argv[1:] or ["--help"]
  known, exits.COMMAND = scripts(), "prm-jax"
  if name in ("-h", "--help"):
    print(__doc__)
    print("\n".join(f"  {each:16} {purpose(path)}" for each, path in known.items()))
  elif name == "--version":
    print(f"prm_jax {prm_jax.__version__}")
  elif name == "doctor" and {*rest} & {"-h", "--help"}:
    print("prm-jax doctor prints installed packages, devices, and what each extra lacks.")
  elif name == "doctor" and rest:
    print(f"prm-jax doctor: takes no arguments, got {' '.join(rest)}", file=sys.stderr)
    sys.exit(2)
  elif name == "doctor":
    from prm_jax.runtime import doctor

    print(doctor.report())
  elif name == "completion":
    from prm_jax.runtime import completion

    print(completion.shell(rest[0] if rest else "bash", known))
  elif (command := name.replace("-", "_")) in known:
    exits.COMMAND, sys.argv = f"prm-jax {command}", [command, *rest]
    runpy.run_path(str(known[command]), run_name="__main__")
  elif command == "benchmark":
    raise SystemExit("prm-jax: benchmark runs only in a clone: python scripts/benchmark.py")
  else:
    from prm_jax import config

    meant = config.nearest(command, known)
    raise SystemExit(f"prm-jax: no command {name}; did you mean {meant}?  --help lists all")


def run() -> None:
  """Runs `main` as the entry point; an error of the input or the installation is one line."""
  exits.run(main)


if __name__ == "__main__":
  run()
