#!/usr/bin/env bash
# The learned drafter on SmolLM2, from zero, on a machine with one GPU: bench/gpu_training.sh OUT GGUF QUESTIONS.
# QUESTIONS: what `python -m bench.drafter questions --questions FILE` wrote where reasoning-gym is. Needs transformers.
# About 5 minutes: 160 s of training, then policy shifts (3 seeds) and tables side by side. Every part records as it ends.
# MINUTES: of the training. PARTS="train shift tables costs" names some of them; all but train and costs need OUT/drafter.
set -u
out=${1:?folder for logs and records}; gguf=${2:?SmolLM2 as GGUF}; asked=${3:?questions}
. bench/gpu_common.sh
parts=" ${PARTS:-train shift tables costs} "
wanted() { [[ $parts == *" $1 "* ]]; }
drafter() { local name=$1 limit=$2; shift 2; part "$name" "$limit" 40 python3 -m bench.drafter "$@" --model demo --questions "$asked" --out "$out"; }
start_build "$out/build.log"
wait_for_build
python3 -c "from bench.grpo import source_of; source_of('$gguf')" # converted once; 'demo' finds it
recipe="--units 4096 --micro-rows 2048"
if wanted train; then drafter train 300 train --minutes "${MINUTES:-2.4}" $recipe --train-share 0.8 --round 1024 --modes shared,topk; fi
if wanted shift; then
  drafter shift 240 shift --drafter "$out/drafter" --seeds 3 --side-by-side 3 --won-back-s 60 --test-n 2 $recipe --round 512 &
fi
if wanted tables; then
  drafter table_modes 240 table --drafter "$out/drafter" --modes merged,suffix &
  drafter table_shapes 240 table --drafter "$out/drafter" --modes shared,topk --profiles 6_4_32,8_4_32,3_8_32,5_4_16 &
  drafter table_06 240 table --drafter "$out/drafter" --temperatures 0.6 --test-n 2 &
  drafter table_0 240 table --drafter "$out/drafter" --temperatures 0 --test-n 1 &
fi
wait
if wanted costs; then
  part costs 120 12 env TMPDIR=/dev/shm python3 -m bench.training --geometry 7b --out "$out"
fi
