#!/usr/bin/env bash
# Makes its environment (.venv-docs) and builds the documentation's site in docs/_build/html.
# A warning is an error.  Arguments are passed to sphinx-build.
#   bash scripts/docs.sh
set -euo pipefail
if [[ ${1-} = -h || ${1-} = --help ]]; then sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit; fi
cd "$(dirname "$0")/.."
source scripts/environment.sh
export JAX_PLATFORMS=cpu
environment .venv-docs '[docs]'
"$python" -m sphinx -b html -W --keep-going -n -q "$@" docs docs/_build/html
echo "-> docs/_build/html/index.html"
