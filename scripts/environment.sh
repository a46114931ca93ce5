# Sourced by the other scripts.  `environment DIRECTORY EXTRAS` makes a virtual environment with the
# project and these extras, and sets $python to its interpreter.  It makes an environment again only
# if setup.py, the extras, the Python version or the checkout's path has changed, or if an
# installation was interrupted.

environment() {
  local directory=$1 extras=$2 stamp=$1/made_by_prm_jax base=${PYTHON:-python3} wanted
  if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "Python 3.11 or newer is needed; $base is $("$base" --version 2>&1)." >&2
    echo "To use another Python: PYTHON=python3.12 bash $0" >&2
    exit 1
  fi
  # The interpreter outside any virtual environment: $directory is replaced below.
  base=$("$base" -c 'import sys; print(sys._base_executable)')
  python=$PWD/$directory/bin/python
  wanted="$(cksum < setup.py) $("$base" --version) $extras $PWD"
  if command -v flock > /dev/null; then # waits for another script that is making it
    { exec 9> "$directory.lock" && flock 9; } || true # some file systems have no locks
  fi
  if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then exec 9>&-; return; fi
  if [ -e "$directory" ] && [ ! -e "$stamp" ]; then
    echo "$PWD/$directory exists and was not made by this script: move it away first." >&2
    exit 1
  fi
  echo "Making $directory and installing the project and its dependencies (minutes, 1 to 2 GB)." >&2
  rm -rf "$directory"
  mkdir "$directory"
  echo unfinished > "$stamp"
  if ! "$base" -m venv "$directory"; then
    echo "$base -m venv failed; on Debian or Ubuntu: apt-get install python3-venv" >&2
    exit 1
  fi
  pip_install --disable-pip-version-check --upgrade pip
  case $extras in *reference*) install_torch ;; esac
  # setuptools warns about editable installs; this one is editable on purpose.
  export PYTHONWARNINGS=ignore
  if [ "$directory" = .venv-oldest ]; then # pip has no --resolution
    pip_install uv
    "$python" -m uv pip install --quiet --python="$python" --resolution=lowest-direct \
      --editable ".$extras" || exit 1
  else
    pip_install --editable ".$extras"
  fi
  unset PYTHONWARNINGS
  case $extras in *reference*) install_tunix ;; esac
  echo "$wanted" > "$stamp"
  exec 9>&-
}

# Ends the script if pip fails, also without the caller's `set -e`: the stamp stays "unfinished".
pip_install() {
  "$python" -m pip install --quiet "$@" || exit 1
}

# Installs tunix without its dependencies, because it works with newer safetensors than it allows;
# then the packages that its GRPO learner imports.
install_tunix() {
  pip_install --no-deps google-tunix==0.1.7
  pip_install "qwix>=0.1.6" "google-metrax>=0.2.3" huggingface_hub jaxtyping \
    pandas perfetto pillow tenacity
}

# Installs torch without CUDA, which would take gigabytes: with pip if its index has that build,
# else with uv, which knows the index of torch's own builds.
install_torch() {
  if ! "$python" -m pip install --quiet torch==2.13.0+cpu 2>/dev/null; then
    pip_install uv
    "$python" -m uv pip install --quiet --python="$python" --torch-backend=cpu torch || exit 1
  fi
}
