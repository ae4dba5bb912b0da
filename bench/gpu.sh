#!/usr/bin/env bash
# All GPU tests, then all GPU benchmarks, on a machine with one GPU: bench/gpu.sh OUT [SECONDS, default 420].
# Needs torch, triton, transformers, pytest-xdist, pytest-benchmark, cmake, ninja, pybind11 and nvcc there; installs
# nothing. Tests run in parallel, benchmarks alone; what no time is left for is named. Logs and gpu.json go to OUT.
# PARTS="tests bandwidth ops decode prefill smollm2 invariance sampler linear attention" names some of them; "sanitize"
# (compute-sanitizer, 200 s) runs by name only;
# TEST_SECONDS limits the tests; SMOLLM2=FILE and TLT_CACHE as bench/smollm2_gpu.py wants them.
set -u
out=${1:?folder for logs and records}; total=${2:-420}
. bench/gpu_common.sh
parts=" ${PARTS:-tests bandwidth ops decode prefill smollm2 invariance sampler linear attention} "
wanted() { [[ $parts == *" $1 "* ]]; }
bench() { # NAME SECONDS LINES MODULE ARGUMENTS...: as `part`, within what is left of the time
  local name=$1 limit=$2 lines=$3 left=$((total - SECONDS))
  shift 3
  wanted "$name" || return 0
  if [ "$left" -lt 15 ]; then echo "== $name: no time left"; return 0; fi
  part "$name" $((limit < left ? limit : left)) "$lines" python3 -m "$@" --out "$out"
}
start_build "$out/build.log"
tests="env OMP_NUM_THREADS=1 python3 -m pytest --tb=short -p no:warnings --maxfail=40 --durations=8"
alone="released or out_of_memory or share_no_pool or random_switches"
if wanted tests; then
  part triton_tests 90 3 $tests tests/gpu/test_elementwise.py -n 12 # needs no build
fi
wait_for_build
if wanted tests; then
  # --dist worksteal: one slow file must not hold up a worker while others idle
  part gpu_tests "${TEST_SECONDS:-170}" 40 $tests tests/gpu --ignore=tests/gpu/test_elementwise.py -n 12 --dist worksteal -k "not ($alone)"
  part gpu_tests_alone 60 6 $tests tests/gpu/test_engine.py -k "$alone"
fi
bench sanitize 200 25 tests.gpu.sanitize --seconds 190
bench bandwidth 20 2 bench.kernels --only bandwidth
bench ops 40 11 bench.kernels --only ops
bench decode 100 18 bench.decode --only plain,verify --batches 1,8,64 --cases 1x32,8x16
bench prefill 60 6 bench.prefill
if [ -n "${SMOLLM2:-}" ]; then
  bench smollm2 60 16 bench.smollm2_gpu compare "$SMOLLM2"
  if wanted smollm2; then part smollm2_bits 60 12 python3 -m bench.smollm2_gpu invariant "$SMOLLM2" --out "$out"; fi
fi
if [ -f bench/invariance.py ]; then bench invariance 160 40 bench.invariance; fi
bench sampler 40 20 bench.kernels_sampler
bench linear 40 16 bench.kernels_linear --rows 1 16 64
left=$((total - SECONDS))
bench attention 120 24 bench.kernels_attention --sweep none --seconds $((left > 40 ? left - 20 : 20))
echo "== all: $SECONDS s"
