#!/usr/bin/env bash
# Trains a commit on a Cloud TPU slice, watches the run, and deletes the slice when the run ends.
#
#   bash scripts/launch_tpu.sh --project=P --zone=Z --name=qwen-7b --topology=v5p:2x4x4 --spot \
#     --config=configs/prm800k_qwen2.5_math_7b.py --workdir=gs://BUCKET/runs/qwen_7b \
#     --copy=gs://BUCKET/data/prm800k=data/prm800k -- --config.train.save_every=50
#   --topology=v5p:2x4x4        generation (v5e, v5p, v6e) and shape, as for compile_for_tpu.py
#   --config=FILE               in the repository; other flags of train.py follow after --
#   --workdir=gs://BUCKET/DIR   of the run; a directory on the slice would be deleted with it
#   --copy=gs://BUCKET/DIR=DIR  a folder that every worker copies before it trains; repeatable
#   --commit=REV                the commit to run; by default HEAD, without uncommitted changes
#   --spot                      cheaper; if the slice is preempted, the script requests it again
#   --delete                    only deletes the slice of this project, zone and name
#   --dry_run                   prints every command and runs none
# The script waits until the run ends and exits with the run's code.  An interrupt deletes the slice
# too; after another launch, the run resumes from its last checkpoint.  docs/tpu.md has more.
set -euo pipefail

fail() { echo "launch_tpu.sh: $1" >&2; exit 2; }
check() {
  if [ -z "$2" ]; then fail "no --$1; --help lists the flags"; fi
  if ! [[ $2 =~ ^($3)$ ]]; then fail "--$1=$2: expected $4"; fi
}
run() { printf '%q ' "$@"; echo; if ! $dry_run; then "$@"; fi; }

delete=false dry_run=false project='' zone='' name='' topology='' config='' workdir='' commit=''
spot=() copies=() overrides=()
while [ $# -gt 0 ]; do
  case $1 in
    --project=* | --zone=* | --name=* | --topology=* | --config=* | --workdir=* | --commit=*)
      key=${1%%=*}; printf -v "${key#--}" %s "${1#*=}" ;;
    --copy=gs://?*=*) # the last = separates the folder
      [[ ${1##*=} == [A-Za-z0-9_]* ]] || fail "$1: expected gs://BUCKET/DIR=DIR, DIR a relative path"
      copies+=("${1#*=}") ;;
    --spot) spot=(--spot) ;;
    --delete | --dry_run) printf -v "${1#--}" true ;;
    -h | --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p;}' "$0"; exit ;;
    --) shift; overrides=("$@"); break ;;
    *) fail "unknown argument $1; --help lists them" ;;
  esac
  shift
done
check name "$name" '[a-z][-a-z0-9]*' 'a-z, 0-9 and -'
for key in project zone; do check $key "${!key}" '[a-z][-.:a-z0-9]*' 'a-z, 0-9, -, . and :'; done
queue=(gcloud compute tpus queued-resources) place=("--project=$project" "--zone=$zone")
exists() {  # prints yes or no; prints nothing if the cloud does not answer
  names=$("${queue[@]}" list "${place[@]}" '--format=value(name)') || return 0
  if grep -qE "(^|/)$name\$" <<< "$names"; then echo yes; else echo no; fi
}
give_back() {
  until run "${queue[@]}" delete "$name" "${place[@]}" --force --quiet || [ "$(exists)" = no ]; do
    echo "launch_tpu.sh: $name could not be deleted and still costs money; trying again" >&2
    sleep 60
  done
}
$dry_run || command -v gcloud > /dev/null || fail 'gcloud is not installed'
if $delete; then give_back; exit; fi
# The slices that Cloud TPU offers, as in prm_jax/tpu/compilation.py.
flat='1x1|2x2|2x4|4x4|4x8|8x8|8x16|16x16' small='2x2x1|2x2x2|2x2x4|2x4x4'
check topology "$topology" "(v5e|v6e):($flat)|v5p:($small|[1-9][0-9]*(x[1-9][0-9]*){2})" \
  "v5e or v6e and one of $flat, or v5p and one of $small or ascending multiples of 4"
shape=${topology#*:} chips=$((${shape//x/*}))
if [[ $topology == v5p:* && ! $shape =~ ^($small)$ ]]; then
  IFS=x read -r a b c <<< "$shape"
  (((a % 4 + b % 4 + c % 4) == 0 && 0 < a && a <= b && b <= c && chips <= 6144)) ||
    fail "--topology=$topology: expected one of $small, or ascending multiples of 4, as in 4x4x8"
fi
case ${topology%%:*} in
  v5e) type=v5litepod-$chips runtime=v2-alpha-tpuv5-lite ;;
  v5p) type=v5p-$((2 * chips)) runtime=v2-alpha-tpuv5 ;;  # its number counts cores, two a chip
  v6e) type=v6e-$chips runtime=v2-alpha-tpuv6e ;;
esac
check config "$config" '.+' 'a file of the repository'
check workdir "$workdir" 'gs://[^/]+/.*[^/]' 'gs://BUCKET/DIRECTORY, which outlives the slice'
cd "$(dirname "$0")/.."
if [ -z "$commit" ] && [ -n "$(git status --porcelain)" ]; then
  uncommitted='there are uncommitted changes; commit them, or run without them: --commit=HEAD'
  if $dry_run; then echo "launch_tpu.sh: $uncommitted" >&2; else fail "$uncommitted"; fi
fi
commit=$(git rev-parse --verify --quiet "${commit:-HEAD}^{commit}") ||
  fail '--commit: no such commit, or this is not a git clone'
git cat-file blob "$commit:$config" &> /dev/null ||
  fail "--config=$config: not a file of commit $commit"
launch=$workdir/launch/$name-$(date +%Y%m%d-%H%M%S)  # holds the source, the logs and the exit code
arguments=("--config=$config" "--workdir=$workdir" ${overrides[@]+"${overrides[@]}"})
folder=$(mktemp -d)
{ echo '#!/bin/bash'; declare -p launch copies arguments; cat <<'JOB'; } > "$folder/job.sh"
# Runs as root on every worker at each boot.  As a service, it lets the run save at a shutdown.
if [ "${1-}" != service ]; then
  cp "$0" /root/job.sh
  exec systemd-run --unit=prm_jax -p After=network-online.target bash /root/job.sh service
fi
exec >> /var/log/prm_jax.log 2>&1
export HOME=/root PATH=$PATH:/snap/bin
trap exit TERM  # runs after the training process, which gets the signal too, has saved
install() {
  mkdir -p /opt/prm_jax && cd /opt/prm_jax &&
    gcloud storage cp "$launch/source.tar.gz" . && tar -xzf source.tar.gz &&
    python3 -m pip install --quiet uv && python3 -m uv venv --allow-existing --python=3.12 &&
    python3 -m uv pip install --quiet '.[tpu,tensorboard]' || return
  for copy in "${copies[@]}"; do
    mkdir -p "${copy##*=}" && gcloud storage rsync -r "${copy%=*}" "${copy##*=}" || return
  done
}
for start in {1..20}; do
  code=75  # a failed installation is tried again
  install && { .venv/bin/python scripts/train.py "${arguments[@]}"; code=$?; }
  gcloud storage cp /var/log/prm_jax.log "$launch/$(hostname).log"
  case $code in 75 | 134 | 137 | 143) sleep 10 ;; *) break ;; esac  # docs/checkpoints.md
done
until gcloud storage cp - "$launch/exit" <<< "$code"; do sleep 60; done
JOB
request() {
  run "${queue[@]}" create "$name" "${place[@]}" "--node-id=$name" ${spot[@]+"${spot[@]}"} \
    "--accelerator-type=$type" "--runtime-version=$runtime" \
    --scopes=https://www.googleapis.com/auth/cloud-platform \
    "--metadata-from-file=startup-script=$folder/job.sh" || [ "$(exists)" = yes ]
}
told=(gcloud storage cat "$launch/exit")
state=("${queue[@]}" describe "$name" "${place[@]}" '--format=value(state.state)')
if $dry_run; then
  echo "launch_tpu.sh: the files of these commands are in $folder" >&2
else
  trap 'rm -rf "$folder"' EXIT
fi
run git archive --format=tar.gz "--output=$folder/source.tar.gz" "$commit"
run gcloud storage cp "$folder/source.tar.gz" "$launch/source.tar.gz"
if $dry_run; then
  sed 's/^/#   /' "$folder/job.sh"
  request; run "${told[@]}"; run "${state[@]}"; give_back; exit
fi
if [ "$(exists)" != no ]; then fail "--name=$name: in use (--delete deletes it), or no answer"; fi
finish() {
  set +e; trap '' INT TERM HUP PIPE # no second Ctrl-C, closed terminal or pipe stops the deletion
  echo "launch_tpu.sh: deleting $name; Ctrl-\\ would leave it, and it costs money" >&2 ||
    exec 2> /dev/null # for gcloud
  exec >&2
  give_back
  rm -rf "$folder"
}
trap finish EXIT
trap 'exit 130' INT TERM HUP
request || fail 'the request for the slice failed: see the message above'
while ! code=$("${told[@]}" 2>/dev/null); do
  case $("${state[@]}") in
    SUSPENDED) give_back; until request; do sleep 60; done ;;
    '') [ "$(exists)" != no ] || fail 'the slice is gone: something else deleted it' ;;
    FAILED) fail 'the request failed: too little quota, or a shape that this zone lacks' ;;
  esac
  sleep 60
done
echo "exit code $code; logs are in $launch"
exit "${code:-1}"
