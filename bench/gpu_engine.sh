#!/usr/bin/env bash
# Build, test and time the engine on a machine with one GPU: bench/gpu_engine.sh OUT [arguments of bench.decode].
# Needs triton, transformers and pytest-xdist there, too. NO_TESTS=1 leaves the tests out.
set -u
out=${1:?folder for logs and records}; shift
. bench/gpu_common.sh
start_build "$out/build.log"
wait_for_build
alone="released or out_of_memory or share_no_pool or random_switches"
if [ -z "${NO_TESTS:-}" ]; then
  part engine_tests 150 40 python3 -m pytest tests/gpu/test_engine.py -n 8 -k "not ($alone)" --tb=short --maxfail=12 -p no:warnings
  part engine_tests_alone 60 20 python3 -m pytest tests/gpu/test_engine.py -k "$alone" --tb=short -p no:warnings
fi
part decode 200 95 python3 -m bench.decode --only "${PARTS:-plain,verify,profile,graphs}" --out "$out" "$@"
