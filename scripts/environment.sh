# Sourced by quickstart.sh and test.sh: makes a virtual environment and installs the project in it.
# `environment DIRECTORY EXTRAS` sets $python.  One that is up to date is used as it is.

environment() {
  local directory=$1 extras=$2 base=${PYTHON:-python3} wanted stamp=$1/made_by_prm_jax
  if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "Python 3.11 or newer is needed; $base is $("$base" --version 2>&1)." >&2
    echo "Name another one: PYTHON=python3.12 bash $0" >&2
    exit 1
  fi
  base=$("$base" -c 'import sys; print(sys._base_executable)')  # not one that is replaced below
  python=$PWD/$directory/bin/python
  wanted="$(cksum < setup.py) $("$base" --version) $extras $PWD"
  if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then return; fi
  if [ -e "$directory" ] && [ ! -e "$stamp" ]; then
    echo "$PWD/$directory is there and was not made by this script: move it away first." >&2
    exit 1
  fi
  echo "Making $directory and installing the project and what it needs (some minutes, 1 to 2 GB)." >&2
  rm -rf "$directory"
  if ! "$base" -m venv "$directory"; then
    echo "$base cannot make virtual environments; on Debian or Ubuntu: apt-get install python3-venv" >&2
    rm -rf "$directory"
    exit 1
  fi
  echo unfinished > "$stamp"
  "$python" -m pip install --quiet --disable-pip-version-check --upgrade pip
  # setuptools warns about editable installs, which this one is on purpose
  PYTHONWARNINGS=ignore "$python" -m pip install --quiet --editable ".$extras"
  echo "$wanted" > "$stamp"
}
