#!/usr/bin/env bash
# Does a reward model choose better solutions to real problems than a majority vote?  A language
# model writes N solutions of each MATH problem, and grade.py grades them.  Reward models are
# trained on human labels (PRM800K), on labels by rollouts, on outcomes, and on human labels and
# rollouts together.  Each model picks one of the N solutions.
#   bash scripts/mathematics.sh --source=DIR
#   --source=DIR       PRM800K's files, or a part of them, with math_splits/test.jsonl
#   --scale=cpu        a file of configs/mathematics: models, problems, settings
#   --output=DIR       default: runs/mathematics-SCALE
#   --generator=DIR    the language model that writes solutions
#   --base=DIR         base model of the reward models; repeat it for several
#   --problems=N       number of problems to report on
#   --n=N              number of solutions of each problem
#   --benchmark=DIR    published files of ProcessBench, to judge the models on as well
#   --settings         only compare the scale's sampling settings, on problems outside the report
# Relative paths start at the project's folder.
# The same command resumes an interrupted run; other settings need another --output.  It takes
# hours on two CPU cores, and minutes with --scale=smoke.  The results are
# OUTPUT/BASE/REDUCTION/comparison.html for each base model and reduction of steps, and two
# comparisons of these choices (docs/mathematics.md): OUTPUT/own/comparison.html of base models and
# reductions, and OUTPUT/BASE/source/REDUCTION/comparison.html of the sources of labels.
set -euo pipefail
if [[ ${1-} = -h || ${1-} = --help ]]; then sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit; fi
cd "$(dirname "$0")/.."
fail() { echo "mathematics.sh: $1" >&2; exit 2; }

scale=cpu reductions=(product) cpu_devices=1 people_part=16
source='' out='' benchmark='' only_settings=false given=() given_bases=()
for flag in "$@"; do
  case $flag in
    --scale=*) scale=${flag#*=} ;;
    --source=*) source=${flag#*=} ;;
    --benchmark=*) benchmark=${flag#*=} ;;
    --output=*) out=${flag#*=} ;;
    --generator=* | --n=*) key=${flag%%=*}; given+=("${key#--}" "${flag#*=}") ;;
    --problems=*) given+=(reported "${flag#*=}") ;;
    --base=*) given_bases+=("${flag#*=}") ;;
    --settings) only_settings=true ;;
    *) fail "unknown $flag; --help lists the options" ;;
  esac
done
scale_file=configs/mathematics/$scale.sh
[ -f "$scale_file" ] || fail "--scale=$scale: there is no $scale_file"
[ -n "$source" ] || fail "give --source=DIR, a folder with PRM800K's files"
if [ -n "$benchmark" ]; then
  threshold_data=$(ls "$benchmark"/gsm8k.{jsonl,json} 2>/dev/null | head -n 1 || true)
  [ -n "$threshold_data" ] ||
    fail "--benchmark=$benchmark: there is no gsm8k.jsonl or gsm8k.json to find the threshold on"
fi
source "$scale_file"
for ((i = 0; i < ${#given[@]}; i += 2)); do printf -v "${given[i]}" %s "${given[i + 1]}"; done
[ ${#given_bases[@]} = 0 ] || bases=("${given_bases[@]}")
twice=$(basename -a "${bases[@]}" | sort | uniq -d)
[ -z "$twice" ] || fail "two base models are named $twice, as is the folder of results: rename one"
out=${out:-runs/mathematics-$scale}
origin=$(cd -- "$source" >/dev/null 2>&1 && pwd -P || echo "$source")
made="--scale=$scale --generator=$generator --problems=$reported --n=$n --source=$origin"
made_with=$(cat "$out/made_with" 2>/dev/null || echo "$made")
if [ "$made_with" != "$made" ]; then
  fail "$out was made with $made_with, not $made: give another --output (if the source was only \
moved: correct $out/made_with)"
fi
if [ -z "${python-}" ]; then # tests set it
  source scripts/environment.sh
  environment .venv '[train,tensorboard,gguf]' # as in quickstart.sh, or each would replace it
fi
# A faster allocator for training (docs/benchmarks.md, "Training"), unless the caller chose one.
if [ -z "${LD_PRELOAD-}${GLIBC_TUNABLES-}" ]; then
  allocator=$("$python" -c \
    'from prm_jax.runtime import processes; print(*map("=".join, processes.allocator().items()))')
  [ -z "$allocator" ] || export $allocator
fi
began=$SECONDS
say() { echo "[$(printf '%5d' $((SECONDS - began))) s] $*" >&2; }
run() { # run OUTPUT SCRIPT FLAGS...: skips the script if the output exists
  [ -e "$1" ] || "$python" "scripts/$2.py" "${@:3}"
}
read_with() { # the same for a script that runs a reward model
  JAX_NUM_CPU_DEVICES=$cpu_devices run "$@"
}

mkdir -p "$out"
for model in "$generator" "${bases[@]}"; do
  [ -d "$model" ] || run "$model" fetch_model "$(basename "$model")" --output="$(dirname "$model")"
done
run "$out/problems" split_problems --source="$source" --output="$out/problems" --seed=0 \
  --reported="$reported" --own="$own" --training="$training" ${levels[@]:+--levels "${levels[@]}"}
# Written only here, so that a failed try does not bind the next one.
echo "$made" > "$out/made_with"

if $only_settings; then
  mkdir -p "$out/settings"
  head -n 24 "$out/problems/own.jsonl" > "$out/settings/problems.jsonl"
  for ((i = 0; i < ${#settings[@]}; i++)); do
    say "settings: ${settings[i]}"
    read -ra each <<< "${settings[i]}"
    run "$out/settings/$i.jsonl" generate --model="$generator" "${prompt[@]}" "${sampling[@]}" \
      "${each[@]}" --seed=1 --n=8 --input="$out/settings/problems.jsonl" \
      --output="$out/settings/$i.jsonl"
    run "$out/settings/$i.graded.jsonl" grade --input="$out/settings/$i.jsonl" \
      --output="$out/settings/$i.graded.jsonl"
    "$python" scripts/compare.py --input="$out/settings/$i.graded.jsonl" \
      --output_dir="$out/settings/$i"
  done
  exit
fi

for half in own reported; do
  say "solutions of the $half problems"
  count=$([ $half = own ] && echo "$own_n" || echo "$n")
  run "$out/$half.jsonl" generate --model="$generator" "${prompt[@]}" "${sampling[@]}" \
    --n="$count" --input="$out/problems/$half.jsonl" --output="$out/$half.jsonl"
  run "$out/$half.graded.jsonl" grade --input="$out/$half.jsonl" --output="$out/$half.graded.jsonl"
done

say "labels of people, by rollouts and by outcomes"
run "$out/people" prepare_data --dataset=prm800k --source="$source" --output="$out/people"
run "$out/rollouts.jsonl" annotate --method=rollouts --model="$generator" "${prompt[@]}" \
  "${sampling[@]}" "${rollouts[@]}" --input="$out/own.graded.jsonl" --output="$out/rollouts.jsonl"
run "$out/rollouts" prepare_data --dataset=stepwise --source="$out/rollouts.jsonl" \
  --output="$out/rollouts" --stepwise.test_share=0

labelled() { # labelled LABEL ROLLOUTS: sets `data` to the flags of train.py for these labels
  case $1 in
    people) data=(--config.data.directory="$out/people") ;;
    both) data=(--config.data.directory="$out/people" --config.data.also="$2") ;;
    *) data=(--config.data.directory="$2" --config.data.eval_split=train) ;;
  esac
  [ "$1" != outcomes ] || data+=(--config.loss.objective=outcome)
}
reward_model() { # reward_model AT INPUT PART: trains on a part of `data`, and scores solutions
  local lora=()
  if [[ " ${lora_bases[*]-} " == *" $name "* ]]; then
    lora=(--config.model.lora_rank=16 --config.optim.trained=lora
      --config.optim.learning_rate=2e-4)
  fi
  say "$name on labels of ${1#"$out/$name/"}: training"
  [ -e "$1.jsonl" ] || "$python" scripts/train.py --config="$recipe" --workdir="$1" \
    --config.init.checkpoint="$base" "${updates[@]}" ${lora[@]:+"${lora[@]}"} \
    "${data[@]}" --config.data.share="$("$python" -c "print(1 / $3)")"
  say "$name on labels of ${1#"$out/$name/"}: scoring"
  read_with "$1.jsonl" score --checkpoint="$1" --skip_cut_off --input="$2" --output="$1.jsonl"
}
for base in "${bases[@]}"; do
  name=$(basename "$base")
  scores=() judged=()
  for part in "${parts[@]}"; do # first all labels, then smaller parts
    [[ $part = 1 || " ${undivided[*]-} " != *" $name "* ]] || continue
    for label in people rollouts outcomes both; do
      model=$label$([ "$part" = 1 ] || echo "/$part")
      at=$out/$name/${model/\//-}
      labelled "$label" "$out/rollouts"
      reward_model "$at" "$out/reported.graded.jsonl" "$part"
      scores+=("$model=$at.jsonl")
    done
  done
  for label in ${benchmark:+people rollouts both}; do
    at=$out/$name/$label
    say "$name on labels of $label: ProcessBench"
    read_with "$at.process_bench.json" evaluate --checkpoint="$at" --benchmark=process_bench \
      --data_dir="$benchmark" --threshold_data="$threshold_data" \
      --output="$at.process_bench.json"
    judged+=("$label=$at.process_bench.json")
  done
  say "comparing, $name"
  for how in "${reductions[@]}"; do
    "$python" scripts/compare.py --input="$out/reported.graded.jsonl" --scores "${scores[@]}" \
      --reduction="$how" ${judged[@]:+--process_bench "${judged[@]}"} \
      --output_dir="$out/$name/$how" --title="Which of $n solutions? $name, $how of the steps"
  done
done
say "comparing reductions of steps and base models, on test problems of the other half"
only() { # only OUTPUT INPUT FLAG: keeps solutions of test problems (-e), or the others (-ve)
  [ -e "$1" ] || { grep "$3" '"unique_id": "test/' "$2" > "$1.new" && mv "$1.new" "$1"; }
}
only "$out/own_test.graded.jsonl" "$out/own.graded.jsonl" -e ||
  fail "$out/own.graded.jsonl has no test problems: the scale has own=$own"
scores=()
for base in "${bases[@]}"; do
  at=$out/$(basename "$base")
  read_with "$at/people_own.jsonl" score --checkpoint="$at/people" --skip_cut_off \
    --input="$out/own_test.graded.jsonl" --output="$at/people_own.jsonl"
  for how in $("$python" -c 'from prm_jax.reductions import *; print(*REDUCTIONS)') calibrated; do
    scores+=("$(basename "$base"):$how=$at/people_own.jsonl")
  done
done
"$python" scripts/compare.py --input="$out/own_test.graded.jsonl" --scores "${scores[@]}" \
  --against "${scores[0]%%=*}" --output_dir="$out/own" --title="Models of people's labels"

say "comparing sources of labels on the same problems: each model is trained on other problems"
if only "$out/training_rollouts.jsonl" "$out/rollouts.jsonl" -ve; then
  run "$out/training_rollouts" prepare_data --dataset=stepwise --stepwise.test_share=0 \
    --source="$out/training_rollouts.jsonl" --output="$out/training_rollouts"
  for base in "${bases[@]}"; do
    name=$(basename "$base")
    scores=("people=$out/$name/people_own.jsonl")
    for label in rollouts outcomes people; do
      part=1 model=$label
      [ $label != people ] || part=$people_part model=people-$people_part
      labelled $label "$out/training_rollouts"
      reward_model "$out/$name/source/$model" "$out/own_test.graded.jsonl" "$part"
      scores+=("$model=$out/$name/source/$model.jsonl")
    done
    for how in "${reductions[@]}"; do
      "$python" scripts/compare.py --input="$out/own_test.graded.jsonl" --scores "${scores[@]}" \
        --reduction="$how" --against "people-$people_part" rollouts \
        --output_dir="$out/$name/source/$how" \
        --title="Sources of labels, $name, $how of the steps"
    done
  done
else
  say "skipped: there are no rollouts of training problems"
fi
say "archiving solutions, grades and scores in $out/mathematics.tar.xz"
kept=(problems own.graded.jsonl reported.graded.jsonl rollouts.jsonl own/comparison.{json,png,html})
for base in "${bases[@]}"; do
  for file in "$out/$(basename "$base")"{,/source}/{*{.jsonl,.process_bench.json},*/comparison.*}; do
    [ ! -e "$file" ] || kept+=("${file#"$out/"}")
  done
done
# A window as large as several files: all of them have the same texts.
tar -cf - -C "$out" "${kept[@]}" | "$python" -c 'import lzma, shutil, sys
with lzma.open(sys.argv[1], "wb", preset=9) as out:
  shutil.copyfileobj(sys.stdin.buffer, out)' "$out/mathematics.tar.xz.new"
mv "$out/mathematics.tar.xz.new" "$out/mathematics.tar.xz"
say "done; open $out/*/*/comparison.html, $out/own/comparison.html and" \
  "$out/*/source/*/comparison.html"
