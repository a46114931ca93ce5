"""Completion of `prm-jax` in bash and zsh."""

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
    COMPREPLY=($(compgen -W "{commands} completion doctor" -- "$cur"))
    return
  fi
  case "${{COMP_WORDS[1]//-/_}}" in
{cases}
  esac
  case "$cur" in -*) COMPREPLY=($(compgen -W "$words" -- "$cur")) ;; esac
}}
complete -o default -F _prm_jax prm-jax"""
ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def flags(script: pathlib.Path) -> list[str]:
  """The flags that a script's help names."""
  done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True)
  return sorted({*re.findall(r"(?<![\w-])--[a-z][\w.]*", done.stdout)})


def shell(name: str, scripts: Mapping[str, pathlib.Path]) -> str:
  """A script for the shell `name`, "bash" or "zsh", to be sourced."""
  if name not in ("bash", "zsh"):
    raise ValueError(f"completion {name}: expected bash or zsh")
  cases = [f'    {each}) words="{" ".join(flags(path))}" ;;' for each, path in scripts.items()]
  code = BASH.format(commands=" ".join(scripts), cases="\n".join(cases))
  return ZSH + code if name == "zsh" else code
