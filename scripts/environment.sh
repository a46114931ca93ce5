# Sourced by quickstart.sh and test.sh: makes a virtual environment and installs the project in it.
# environment DIR EXTRAS sets $python.  An environment that is up to date is used as it is.

environment() {
  local directory=$1 extras=$2 base=${PYTHON:-python3} wanted stamp
  if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "Python 3.11 or newer is needed; $base is $("$base" --version 2>&1)." >&2
    echo "Name another one with PYTHON=python3.12 bash $0" >&2
    exit 1
  fi
  python=$PWD/$directory/bin/python
  wanted="$(cksum < setup.py) $("$base" --version) $extras $PWD"
  stamp=$directory/installed
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "Making $directory and installing the project and what it needs (a few minutes, 1.3 GB)." >&2
    rm -rf "$directory"
    if ! "$base" -m venv "$directory"; then
      echo "$base has no venv module; on Debian and Ubuntu: apt-get install python3-venv" >&2
      exit 1
    fi
    "$python" -m pip install --quiet --disable-pip-version-check --editable ".$extras"
    echo "$wanted" > "$stamp"
  fi
}
