#!/usr/bin/env bash
# Makes its environment (.venv-test) and passes the tests.  Arguments go to pytest:
#   bash scripts/test.sh                      the whole suite
#   bash scripts/test.sh -k packing           some of it
#   bash scripts/test.sh -m slow              what takes longer than the suite allows
#   bash scripts/test.sh --reference          what needs torch and transformers, or Apache Beam: in
#                                             .venv-reference and .venv-beam, as Beam caps protobuf
#   bash scripts/test.sh --oldest             all with the oldest versions that setup.py allows
set -euo pipefail
if [[ ${1-} = -h || ${1-} = --help ]]; then sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit; fi
cd "$(dirname "$0")/.."
source scripts/environment.sh
export JAX_PLATFORMS=cpu
if [ "${1-}" = --reference ]; then
  shift
  status=0
  for mark in reference beam; do
    environment ".venv-$mark" "[test,$mark]"
    "$python" -m pytest -m "$mark and not slow" --no_skips -rs "$@" || status=$?
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
  # whole files to a process first, so that it makes what their tests share once
  *) exec "$python" -m pytest -m "not slow" --numprocesses=2 --dist=worksteal "$@" ;;
esac
