#!/usr/bin/env bash
# The RL side on a machine with one GPU: bench/gpu_rl.sh OUT MODEL ASKED. MODEL: SmolLM2's folder or GGUF file; ASKED: what
# `python -m bench.grpo questions` wrote. Needs transformers there. Each part's records are kept as it goes; the runs' own
# files, step by step, lie in OUT/runs. PARTS="update logprob speed identical reward sleep" names some of them, in that order.
set -u
out=${1:?folder for logs and records}; model=${2:?SmolLM2}; asked=${3:?questions}
. bench/gpu_common.sh
parts=" ${PARTS:-update logprob speed identical reward sleep} "
wanted() { [[ $parts == *" $1 "* ]]; }
task="--asked $asked --model $model --out $out"
start_build "$out/build.log"
wait_for_build
python3 -c "from bench.grpo import source_of; source_of('$model')" # converted once, before many processes want it
if wanted update; then part update 30 9 python3 -m bench.rl update --out "$out"; fi
if wanted logprob; then part logprob 150 12 python3 -m bench.rl logprob $task; fi
if wanted speed; then part speed 70 20 python3 -m bench.grpo speed $task --to "$out/runs" --steps 6 --test-questions 64; fi
if wanted identical; then part identical 190 16 python3 -m bench.grpo identical $task --to "$out/runs" --limit-s 160; fi
if wanted reward; then
  part reward 260 50 python3 -m bench.grpo reward $task --to "$out/runs" --limit-s 220 --steps 30 --max-tokens 256
fi
if wanted sleep; then part sleep 90 60 python3 -m bench.rl sleep --out "$out"; fi
