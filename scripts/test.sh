#!/usr/bin/env bash
# Makes its environment (.venv-test) and runs the tests.  Arguments are passed to pytest:
#   bash scripts/test.sh                      the whole suite
#   bash scripts/test.sh -k packing           the tests with this word in their name
#   bash scripts/test.sh -m slow              the tests that take too long for the suite
#   bash scripts/test.sh --reference          the tests that need torch and transformers, in
#                                             .venv-reference, and those that need Apache Beam, in
#                                             .venv-beam, because Beam caps protobuf
#   bash scripts/test.sh --oldest             the suite with the oldest versions of setup.py
set -euo pipefail
if [[ ${1-} = -h || ${1-} = --help ]]; then sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit; fi
cd "$(dirname "$0")/.."
source scripts/environment.sh
export JAX_PLATFORMS=cpu
if [ "${1-}" = --reference ]; then
  shift
  status=5 # 5: no test was selected
  for mark in reference beam; do
    environment ".venv-$mark" "[test,$mark]"
    code=0
    "$python" -m pytest -m "$mark and not slow" --no_skips -rs "$@" || code=$?
    if [ $code != 5 ] && { [ $status = 5 ] || [ $code != 0 ]; }; then status=$code; fi
  done
  exit $status
fi
if [ "${1-}" = --oldest ]; then
  shift
  environment .venv-oldest '[test]'
  exec "$python" -m pytest -m "not slow" --numprocesses=2 --dist=worksteal "$@"
fi
environment .venv-test '[test]'
"$python" -m ruff check .
"$python" -m ruff format --check --quiet .
case " $* " in
  *" -m "*) exec "$python" -m pytest "$@" ;;
  # worksteal gives each process whole files first, so that shared fixtures are made once
  *) exec "$python" -m pytest -m "not slow" --numprocesses=2 --dist=worksteal "$@" ;;
esac
