"""Shell completion of `prm-jax` in bash and zsh."""

import pathlib
import re
import subprocess
import sys
from collections.abc import Mapping

BASH = """\
_prm_jax() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} words=
  COMPREPLY=()
  if [ "$COMP_CWORD" = 1 ]; then
    words="{commands} completion doctor --help --version"
    case "$cur" in [a-z]*-*) words=${{words//_/-}} ;; esac  # as it was begun
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
    return
  fi
  case "${{COMP_WORDS[1]//-/_}}" in
{cases}
    completion) COMPREPLY=($(compgen -W "bash zsh" -- "$cur")); return ;;
  esac
  case "$cur" in -*) COMPREPLY=($(compgen -W "$words" -- "$cur")) ;; esac
}}
complete -o default -F _prm_jax prm-jax"""
ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def flags(script: pathlib.Path) -> list[str]:
  """Returns the flags of a script from its --help, without the other flags mentioned there."""
  done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True)
  name = r"(--[a-z](?:[\w.]*\w)?)"
  listed = re.findall(rf"^. {name}", done.stdout, re.M)  # in the box that tyro draws, or --config
  return sorted({"--help", *(listed or re.findall(rf"(?<![\w-]){name}", done.stdout))})


def shell(name: str, scripts: Mapping[str, pathlib.Path]) -> str:
  """Returns the completion script of the shell `name`, "bash" or "zsh", to be sourced."""
  if name not in ("bash", "zsh"):
    raise ValueError(f"completion {name}: expected bash or zsh")
  cases = [f'    {x}) words="{" ".join(flags(path))}" ;;' for x, path in scripts.items()]
  code = BASH.format(commands=" ".join(scripts), cases="\n".join(cases))
  return ZSH + code if name == "zsh" else code
