#!/usr/bin/env bash
# Draws a best-of-N curve from scratch: makes its environment (.venv), generates the embedded
# dataset, trains a process and an outcome reward model, scores 1,024 candidate solutions of each of
# 200 held-out problems with both, and writes the report.  After an interrupt, the same command
# resumes.
#   bash scripts/quickstart.sh [SEED] [DIRECTORY]
# A relative DIRECTORY starts at the project's folder.
set -euo pipefail
if [[ ${1-} = -h || ${1-} = --help ]]; then sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit; fi
cd "$(dirname "$0")/.."
if [ -z "${python-}" ]; then # the benchmark sets its own
  source scripts/environment.sh
  environment .venv '[train,tensorboard,gguf]' # as mathematics.sh
fi
seed=${1:-0}
out=${2:-runs/quickstart-$seed}
data=$out/data
began=$SECONDS
say() { echo "[$(printf '%3d' $((SECONDS - began))) s] $*" >&2; }

if [ ! -f "$data/manifest.json" ]; then
  say "generating problems, labelled solutions and candidates"
  "$python" scripts/prepare_data.py --dataset=arithmetic --arithmetic.seed="$seed" --output="$data"
fi
if [ ! -f "$data/tokenizer.model" ]; then
  "$python" scripts/train_tokenizer.py --data="$data" --output="$data/tokenizer.model" \
    --vocab_size=320
fi
named() { # NAME: prefixes each line with a name; ignores SIGTERM, to show how a stopped run ends
  trap '' TERM
  while IFS= read -r line; do echo "$1: $line"; done >&2
}
model() { # OBJECTIVE UPDATES: trains a reward model, and scores the candidates with it
  local run=$out/$1
  trap 'exit 143' TERM # after the command that runs, which saves its state
  "$python" scripts/train.py --config=configs/arithmetic.py --workdir="$run" \
    --config.loss.objective="$1" --config.train.steps="$2" \
    --config.data.directory="$data" --config.data.tokenizer="$data/tokenizer.model" \
    --config.train.seed="$seed" 2>&1 | named "$1"
  "$python" scripts/score.py --checkpoint="$run" --input="$data/candidates.jsonl" \
    --output="$out/scored_$1.jsonl" 2>&1 | named "$1"
}
# Both at once, because one model this small does not fill two cores.  The outcome model has the
# harder task and gets more updates.  Both numbers of updates were tuned on other seeds.
say "training both reward models, and scoring the candidates with each"
set -m # each job is a process group, which ends with this script
trap 'for job in $(jobs -p); do kill -- "-$job" || :; done 2>/dev/null; wait' EXIT
finish() { # OBJECTIVE JOB
  wait "$2" || { say "the $1 reward model failed: see the last lines after \"$1:\""; exit 1; }
}
model process 5000 & process=$!
model outcome 6000 & outcome=$!
finish process $process
finish outcome $outcome
say "reranking"
"$python" scripts/rerank.py --input "$out/scored_process.jsonl" "$out/scored_outcome.jsonl" \
  --output_dir="$out/report"
say "done; open $out/report/report.html"
