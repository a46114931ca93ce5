#!/usr/bin/env bash
# Makes its environment (.venv-test) and passes the tests.  Arguments go to pytest:
#   bash scripts/test.sh                      the whole suite
#   bash scripts/test.sh -k packing           some of it
#   bash scripts/test.sh -m slow              what takes longer than the suite allows
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
environment .venv-test '[test]'
export JAX_PLATFORMS=cpu
"$python" -m ruff check .
"$python" -m ruff format --check --quiet .
case " $* " in
  *" -m "*) exec "$python" -m pytest "$@" ;;
  # whole files to a process first, so that it makes what their tests share once
  *) exec "$python" -m pytest -m "not slow" --numprocesses=2 --dist=worksteal "$@" ;;
esac
