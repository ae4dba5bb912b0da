#!/usr/bin/env bash
# Build, test and time the engine on a machine with one GPU: bench/gpu_engine.sh OUT [arguments of bench.decode].
# Needs torch, triton, transformers, cmake, ninja, pybind11, nvcc and pytest-xdist there; installs nothing.
set -u
out=${1:?folder for logs and records}; shift
export PATH=/usr/local/cuda/bin:$PATH TMPDIR=/tmp PYTHONPATH=.:kernels PYTHONUNBUFFERED=1
arch=$(python3 -c "import torch; print('%d%d' % torch.cuda.get_device_capability())")
(cmake -S . -B /tmp/build -G Ninja -DCMAKE_BUILD_TYPE=Release -DTLT_CUDA=1 -DTLT_OUTPUT_DIR="$PWD/tlt_engine" \
  -DCMAKE_CUDA_ARCHITECTURES="$arch" -DPython_EXECUTABLE="$(which python3)" \
  -Dpybind11_DIR="$(python3 -m pybind11 --cmakedir)" && cmake --build /tmp/build) >"$out/build.log" 2>&1 &
build=$!
wait $build || { tail -30 "$out/build.log"; exit 1; }
echo "== built ($SECONDS s)"
serial="released or out_of_memory or share_no_pool or random_switches"
if [ -z "${NO_TESTS:-}" ]; then
  timeout 150 python3 -m pytest tests/gpu/test_engine.py -n 8 -k "not ($serial)" --tb=short --maxfail=12 -p no:warnings \
    >"$out/engine_tests.log" 2>&1
  timeout 60 python3 -m pytest tests/gpu/test_engine.py -k "$serial" --tb=short -p no:warnings >>"$out/engine_tests.log" 2>&1
  echo "== engine tests ($SECONDS s)"; grep -v "^$\|Warning\|warner" "$out/engine_tests.log" | tail -70 | cut -c1-180
fi
timeout 200 python3 -m bench.decode --only ${PARTS:-plain,verify,profile,graphs} --out "$out" "$@" >"$out/decode.log" 2>&1
echo "== decode ($SECONDS s)"; tail -95 "$out/decode.log" | cut -c1-150
