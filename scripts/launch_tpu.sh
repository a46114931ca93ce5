#!/usr/bin/env bash
# Trains on a Cloud TPU slice: of TPU VMs, or of a GKE cluster that XPK made.  docs/tpu.md has all
# steps before and after.
#
#   bash scripts/launch_tpu.sh --project=P --zone=Z --name=qwen-7b --topology=v5p:2x4x4 --spot \
#     --config=configs/prm800k_qwen2.5_math_7b.py --workdir=gs://BUCKET/runs/qwen_7b \
#     --copy=gs://BUCKET/data/prm800k=data/prm800k -- --config.train.save_every=50
#
# What it does
#   (nothing)          asks for the slice and returns; it trains when it comes, and resumes --workdir
#   --watch            the same, then stays: asks again after a preemption, gives the slice back at
#                      the end and exits with the run's code
#   --logs             what the workers say
#   --delete           gives the slice back; the work directory stays
#   --dry_run          prints the commands of any of these and runs none
#
# What it needs
#   --project --zone --name     of the slice and the run; the name is a word of a-z, 0-9 and -
#   --topology=v5p:2x4x4        generation (v5e, v5p, v6e) and shape, as for compile_for_tpu.py
#   --config=FILE               in the repository; after --, what train.py is to be told besides
#   --workdir=gs://BUCKET/DIR   of the run; DIR/launch/ gets the source, the logs and the state
# What it may be given
#   --copy=gs://BUCKET/DIR=DIR  a folder that every worker copies before it trains; more than once
#   --spot                      cheaper, may be taken away at any time
#   --slices=N                  more than one slice: --config.mesh.data=N
#   --commit=REV                what to run; by default HEAD, which must have no changes beside it
#   --force                     although a run in --workdir has not ended, by its DIR/launch/state
#   --cluster=C --image=I       on GKE: the cluster, and the image's name in Artifact Registry
set -euo pipefail

# A run that ends with one of these is started again: the table in docs/checkpoints.md.
RESTART_CODES=75,134,137,143

fail() {
  echo "launch_tpu.sh: $1" >&2
  exit 2
}

# Prints a command as a shell reads it.
show() {
  printf '%q ' "$@" | sed 's/ $//'
  echo
}

# Prints a command; runs it, unless it is a dry run.
run() {
  show "$@"
  if ! $dry_run; then "$@"; fi
}

# --- the command line ---

action=launch dry_run=false watch=false spot=false force=false slices=1 commit='' cluster='' image=''
project='' zone='' name='' topology='' config='' workdir=''
copies=() overrides=()
while [ $# -gt 0 ]; do
  case $1 in
    --project=*) project=${1#*=} ;;
    --zone=*) zone=${1#*=} ;;
    --name=*) name=${1#*=} ;;
    --topology=*) topology=${1#*=} ;;
    --config=*) config=${1#*=} ;;
    --workdir=*) workdir=${1#*=} ;;
    --copy=*) copies+=("${1#*=}") ;;
    --slices=*) slices=${1#*=} ;;
    --commit=*) commit=${1#*=} ;;
    --cluster=*) cluster=${1#*=} ;;
    --image=*) image=${1#*=} ;;
    --spot) spot=true ;;
    --watch) watch=true ;;
    --force) force=true ;;
    --logs) action=logs ;;
    --delete) action=delete ;;
    --dry_run) dry_run=true ;;
    --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p;}' "$0"; exit ;;
    --) shift; overrides=("$@"); break ;;
    *) fail "unknown argument $1; --help lists them (--key=value, and overrides after --)" ;;
  esac
  shift
done

# matches NAME VALUE PATTERN WHAT: names reach other machines' shells, so they are checked, not
# quoted.
matches() {
  if ! [[ $2 =~ ^$3$ ]]; then fail "--$1=$2: expected $4"; fi
}

matches name "$name" '[a-z]([-a-z0-9]{0,38}[a-z0-9])?' 'a word of a-z, 0-9 and -, up to 40 letters'
matches project "$project" '[a-z][-a-z0-9.:]*[a-z0-9]' 'the ID of a Google Cloud project'
matches zone "$zone" '[a-z]+-[a-z]+[0-9]+-[a-z]' 'a zone, such as us-east5-a'
matches slices "$slices" '[1-9][0-9]{0,2}' 'a number of slices'
if [ -n "$cluster" ]; then
  matches cluster "$cluster" '[a-z]([-a-z0-9]{0,38}[a-z0-9])?' 'the name of a cluster'
  if $spot; then fail '--spot with --cluster: a cluster is spot or not: xpk cluster create --spot'; fi
  if $watch; then fail '--watch with --cluster: the cluster restarts the run by itself'; fi
fi
place=("--project=$project" "--zone=$zone")
nodes=("$name")
if [ "$slices" -gt 1 ]; then
  nodes=()
  for ((i = 0; i < slices; i++)); do nodes+=("$name-$i"); done
fi

# --- looking after a run ---

logs() {
  if [ -n "$cluster" ]; then
    run gcloud logging read "resource.type=\"k8s_container\" \
resource.labels.cluster_name=\"$cluster\" \
labels.\"k8s-pod/jobset_sigs_k8s_io/jobset-name\"=\"$name\"" \
      "--project=$project" --limit=200 '--format=value(textPayload)'  # the newest first
    return
  fi
  run gcloud compute tpus queued-resources describe "$name" "${place[@]}" \
    '--format=value(state.state)'
  for node in "${nodes[@]}"; do
    run gcloud compute tpus tpu-vm ssh "$node" "${place[@]}" --worker=all \
      '--command=tail -n 50 /var/log/prm_jax.log'
  done
}

delete() {
  if [ -n "$cluster" ]; then
    run xpk workload delete "${place[@]}" "--cluster=$cluster" "--workload=$name" --force
  else
    run gcloud compute tpus queued-resources delete "$name" "${place[@]}" --force --quiet
  fi
}

case $action in logs | delete) "$action"; exit ;; esac

# --- starting a run ---

shape=${topology#*:} generation=${topology%%:*}
case $generation in
  v5e) type=v5litepod runtime=v2-alpha-tpuv5-lite dimensions='[0-9]+x[0-9]+' ;;
  v5p) type=v5p runtime=v2-alpha-tpuv5 dimensions='[0-9]+x[0-9]+x[0-9]+' ;;
  v6e) type=v6e runtime=v2-alpha-tpuv6e dimensions='[0-9]+x[0-9]+' ;;
  *) fail "--topology=$topology: expected v5e:AxB, v5p:AxBxC or v6e:AxB" ;;
esac
matches topology "$topology" "$generation:$dimensions" "v5e:AxB, v5p:AxBxC or v6e:AxB"
bucket='gs://[a-z0-9][-a-z0-9._]+/[-A-Za-z0-9._/ =+@,]*[-A-Za-z0-9._=+@,]'
matches workdir "$workdir" "$bucket" 'gs://BUCKET/DIRECTORY, without a / at the end'
for copy in ${copies[@]+"${copies[@]}"}; do
  matches copy "$copy" "$bucket=[A-Za-z0-9_][-A-Za-z0-9._/]*" 'gs://BUCKET/DIRECTORY=DIRECTORY'
  if [[ /$copy/ = */../* ]]; then fail "--copy=$copy: expected a folder below the repository"; fi
done
if [[ "${overrides[*]-}" = *[[:cntrl:]]* ]]; then fail 'a control character after --'; fi
if [ -n "$cluster" ]; then
  matches image "$image" '[a-z0-9][-a-z0-9._/]*[a-z0-9]' 'REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME'
fi

cd "$(dirname "$0")/.."
if [ -z "$commit" ] && [ -n "$(git status --porcelain)" ]; then
  fail 'there are changes that are not committed; commit them, or run what is: --commit=HEAD'
fi
revision=${commit:-HEAD}
commit=$(git rev-parse --verify --quiet "$revision^{commit}") ||
  fail "--commit=$revision: no such commit"
git cat-file -e "$commit:$config" 2>/dev/null ||
  fail "--config=$config: not in commit $commit; expected a file such as configs/arithmetic.py"

folder=${XDG_CACHE_HOME:-$HOME/.cache}/prm_jax/launch
mkdir -p "$folder"
archive=$folder/$commit.tar.gz startup=$folder/$name-startup.sh state=$folder/$name-state
job=(bash scripts/tpu_worker.sh run)
for copy in ${copies[@]+"${copies[@]}"}; do job+=("--copy=$copy"); done
job+=(-- "--config=$config" "--workdir=$workdir" ${overrides[@]+"${overrides[@]}"})
job_line=$(printf '%q ' "${job[@]}")

# Runs as root on every worker, each time it boots.
startup_script() {
  cat <<SCRIPT
#!/bin/bash
set -euo pipefail
export PATH=\$PATH:/snap/bin  # gcloud on Ubuntu
mkdir -p /opt/prm_jax
cd /opt/prm_jax
if [ ! -e scripts/tpu_worker.sh ]; then
  gcloud storage cp $(printf %q "$workdir/launch/source-$commit.tar.gz") /tmp/source.tar.gz
  tar -xzf /tmp/source.tar.gz
fi
RESTART_CODES=$RESTART_CODES LAUNCH=$(printf %q "$workdir/launch") \\
  bash scripts/tpu_worker.sh install $(printf %q "$job_line")
SCRIPT
}

request() {
  local node=("--node-id=$name") tier=()
  if [ "$slices" -gt 1 ]; then node=("--node-count=$slices" "--node-prefix=$name"); fi
  if $spot; then tier=(--spot); fi
  run gcloud compute tpus queued-resources create "$name" "${place[@]}" "${node[@]}" \
    "--type=$type" "--topology=$shape" "--runtime-version=$runtime" ${tier[@]+"${tier[@]}"} \
    --scopes=https://www.googleapis.com/auth/cloud-platform \
    "--metadata-from-file=startup-script=$startup"
}

tell() { run gcloud storage cp "$state" "$workdir/launch/state"; }

# Until it is done, which the list knows if the call does not: it can fail after it has worked.
persist() {
  local pause=${WATCH_SECONDS:-60} found
  until "$1"; do
    echo "launch_tpu.sh: $1 failed for $name; trying again in $pause seconds" >&2
    sleep "$pause"
    if found=$("${list[@]}"); then
      if grep -qE "(^|/)$name\$" <<< "$found"; then found=request; else found=delete; fi
      if [ "$1" = "$found" ]; then return; fi
    fi
  done
}

read_state=(gcloud storage cat "$workdir/launch/state")  # `running`, and then the exit code
describe=(gcloud compute tpus queued-resources describe "$name" "${place[@]}"
  '--format=value(state.state)')
list=(gcloud compute tpus queued-resources list "${place[@]}" '--format=value(name)')

run git archive --format=tar.gz "--output=$archive" "$commit"
if ! $force; then
  show "${read_state[@]}"
  if ! $dry_run && [ "$("${read_state[@]}" 2>/dev/null)" = running ]; then
    fail "a run in $workdir has not ended, and two would spoil each other's files; if its slice is \
gone (--logs shows it, --delete gives it back), go on with --force"
  fi
fi
if [ -n "$cluster" ]; then
  run gcloud builds submit "$archive" "--project=$project" "--tag=$image:$commit"
  run xpk workload create "${place[@]}" "--cluster=$cluster" "--workload=$name" \
    "--tpu-type=$type-$shape" "--num-slices=$slices" "--docker-image=$image:$commit" \
    "--restart-on-exit-codes=$RESTART_CODES" --max-restarts=100 \
    --termination-grace-period-seconds=300 "--command=exec ${job_line% }"
  exit
fi
if $dry_run; then
  echo "# $startup:"
  startup_script | sed 's/^/#   /'
else
  startup_script > "$startup"
  echo running > "$state"
fi
run gcloud storage cp "$archive" "$workdir/launch/source-$commit.tar.gz"
request
persist tell  # after the request: one that is refused leaves no run behind
if ! $watch; then exit; fi

if $dry_run; then
  echo '# then, every minute:'
  run "${read_state[@]}"
  run "${describe[@]}"
  echo '# after a preemption:'
  delete
  request
  echo '# at the end:'
  delete
  echo '# when one of these has failed, before it is tried again:'
  run "${list[@]}"
  exit
fi
while sleep "${WATCH_SECONDS:-60}"; do
  ended=$("${read_state[@]}") || continue  # a lost connection does not end the watch
  if [ "$ended" != running ]; then
    persist delete
    echo "the run ended with code $ended; its logs are in $workdir/launch/"
    exit "$ended"
  fi
  case $("${describe[@]}") in
    SUSPENDED) persist delete; persist request ;;
    FAILED) fail "the request for $name failed; --logs and --delete, then start again" ;;
  esac
done
