#!/usr/bin/env bash
# Build, test and time the learned drafter on a machine with one GPU: bench/gpu_drafter.sh OUT [arguments of bench.decode].
# Needs triton, transformers and pytest-xdist there, too. NO_TESTS=1 leaves the tests out, NO_TIMES=1 the times.
set -u
out=${1:?folder for logs and records}; shift
. bench/gpu_common.sh
start_build "$out/build.log"
wait_for_build
if [ -z "${NO_TESTS:-}" ]; then
  part drafter_tests 170 40 python3 -m pytest tests/gpu/test_learned.py tests/gpu/test_draft.py -n 8 --tb=short --maxfail=12 -p no:warnings
fi
if [ -z "${NO_TIMES:-}" ]; then
  part drafter 220 120 python3 -m bench.decode --only "${PARTS:-drafter,drafter_trace}" --out "$out" "$@"
fi
