#!/usr/bin/env bash
# What a worker of a slice does; scripts/launch_tpu.sh starts it.
#
#   tpu_worker.sh run [--copy=gs://BUCKET/DIR=DIR]... -- ARGUMENTS OF train.py
#   tpu_worker.sh install JOB     on a TPU VM, as root: makes JOB a service, which outlives the
#                                 connection and reboots; then the two below run
#   tpu_worker.sh upload_log      every minute
#   tpu_worker.sh ended           when the service has ended
set -euo pipefail
cd "$(dirname "$0")/.."
log=${LOG:-/var/log/prm_jax.log} units=${UNITS:-/etc/systemd/system}  # elsewhere in tests
python=$PWD/.venv/bin/python
if [ ! -x "$python" ]; then python=python; fi  # in a container

# Copies what is missing, and becomes the training process, so that signals reach it.
run() {
  local copy source folder
  if [ -n "${LAUNCH-}" ]; then count_start; fi  # a cluster counts by itself
  while [ "$1" != -- ]; do
    copy=${1#--copy=} source=${copy%=*} folder=${copy##*=}
    if [ ! -e "$folder" ]; then
      rm -rf "$folder.incomplete"
      mkdir -p "$(dirname "$folder")"
      "$python" -c 'import sys, fsspec
files, path = fsspec.core.url_to_fs(sys.argv[1])
files.get(path.rstrip("/") + "/", sys.argv[2], recursive=True)' "$source" "$folder.incomplete"
      mv "$folder.incomplete" "$folder"
    fi
    shift
  done
  shift
  exec "$python" scripts/train.py "$@"
}

# The slice is paid for while a run that always dies before its next checkpoint starts again.
count_start() {
  local count=0 newest=0 now
  if [ -s starts ]; then read -r count newest < starts; fi
  now=$(gcloud storage ls "${LAUNCH%/launch}/checkpoints/" 2>/dev/null |
    sed -n 's|.*/\([0-9]\{1,\}\)/$|\1|p' | sort -n | tail -n 1) || true  # there may be none
  if [ "${now:-0}" -gt "$newest" ]; then count=0 newest=$now; fi
  if [ "$count" -ge 10 ]; then
    echo "tpu_worker.sh: $count starts and no new checkpoint: not started again" >&2
    exit 1
  fi
  echo "$((count + 1)) $newest" > starts
}

install() {
  printf '#!/bin/bash\nexec %s\n' "$1" > job.sh
  if [ ! -e .venv/installed ]; then
    curl -LsSf https://astral.sh/uv/install.sh | env UV_INSTALL_DIR=/usr/local/bin sh
    uv venv --clear --python=3.12 .venv  # the images have an older Python
    uv pip install --python=.venv/bin/python '.[tpu,tensorboard]'
    touch .venv/installed
  fi
  cat > "$units/prm_jax.service" <<UNIT
[Unit]
Description=prm_jax training
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
WorkingDirectory=$PWD
Environment=HOME=/root PATH=$PATH
Environment=RESTART_CODES=$RESTART_CODES "LAUNCH=$LAUNCH"
ExecStart=/bin/bash $PWD/job.sh
ExecStopPost=/bin/bash $PWD/scripts/tpu_worker.sh ended
StandardOutput=append:$log
StandardError=append:$log
# After a preemption, a lost host, or if it was killed; not after an error, which would come again.
Restart=on-abnormal
RestartForceExitStatus=${RESTART_CODES//,/ } SIGTERM
RestartSec=10
# The training process gets SIGTERM, saves and exits.
KillMode=mixed
TimeoutStopSec=600

[Install]
WantedBy=multi-user.target
UNIT
  cat > "$units/prm_jax_log.service" <<UNIT
[Unit]
Description=prm_jax log to the bucket
After=network-online.target

[Service]
Environment=HOME=/root PATH=$PATH
Environment="LAUNCH=$LAUNCH"
ExecStart=/bin/bash $PWD/scripts/tpu_worker.sh upload_log
Restart=always
RestartSec=60

[Install]
WantedBy=multi-user.target
UNIT
  systemctl daemon-reload
  systemctl enable --now --no-block prm_jax prm_jax_log
}

metadata() {
  curl -sf -H 'Metadata-Flavor: Google' \
    "http://metadata.google.internal/computeMetadata/v1/instance/$1"
}

upload() {
  gcloud storage cp --quiet "$log" "$LAUNCH/$(metadata hostname | cut -d. -f1).log"
}

upload_log() {
  while true; do
    if [ -e "$log" ]; then upload; fi
    sleep 60
  done
}

# systemd says how the service ended in EXIT_CODE (exited, killed) and EXIT_STATUS.  The first worker
# tells of the end of the run; of an error, whoever has one: the others only lost a host.
ended() {
  local count newest pause
  upload || true
  case $EXIT_STATUS in
    75 | 143 | TERM)  # a preemption: its start does not count
      if [ -s starts ]; then
        read -r count newest < starts
        echo "$((count - 1)) $newest" > starts
      fi
      ;;
  esac
  if [ "$EXIT_CODE" != exited ]; then return; fi
  case ,$RESTART_CODES, in *",$EXIT_STATUS,"*) return ;; esac
  if [ "$EXIT_STATUS" != 0 ] || [ "$(metadata attributes/agent-worker-number)" = 0 ]; then
    for pause in 0 1 10 60 300; do  # --watch gives the slice back when it hears of it
      sleep "$pause"
      if gcloud storage cp - "$LAUNCH/state" <<< "$EXIT_STATUS"; then break; fi
    done
  fi
}

"$@"
