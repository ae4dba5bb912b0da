#!/usr/bin/env bash
# Build, test and measure on a machine with one GPU: bench/gpu.sh OUT [seconds for the attention sweep].
# Needs torch, triton, cmake, ninja, pybind11, nvcc and pytest-xdist there; installs nothing.
set -u
out=${1:?folder for logs and records}; sweep=${2:-120}
export PATH=/usr/local/cuda/bin:$PATH TMPDIR=/tmp PYTHONPATH=.:kernels PYTHONUNBUFFERED=1
arch=$(python3 -c "import torch; print('%d%d' % torch.cuda.get_device_capability())")
(cmake -S . -B /tmp/build -G Ninja -DCMAKE_BUILD_TYPE=Release -DTLT_CUDA=1 -DTLT_OUTPUT_DIR="$PWD/tlt_engine" \
  -DCMAKE_CUDA_ARCHITECTURES="$arch" -DPython_EXECUTABLE="$(which python3)" \
  -Dpybind11_DIR="$(python3 -m pybind11 --cmakedir)" && cmake --build /tmp/build) >"$out/build.log" 2>&1 &
build=$!
start=$SECONDS
timeout 150 python3 -m pytest tests/gpu/test_elementwise.py -n 12 --maxfail=15 --tb=line -p no:warnings >"$out/elementwise_tests.log" 2>&1
echo "== element-wise tests ($((SECONDS - start)) s)"; tail -3 "$out/elementwise_tests.log" | cut -c1-200
wait $build || { tail -30 "$out/build.log"; exit 1; }
echo "== built ($((SECONDS - start)) s)"
timeout 200 python3 -m pytest tests/gpu/test_attention.py tests/gpu/test_invariant_attention.py tests/gpu/test_linear.py -n 12 --maxfail=15 --tb=line -p no:warnings >"$out/attention_tests.log" 2>&1
echo "== attention and product tests ($((SECONDS - start)) s)"; tail -12 "$out/attention_tests.log" | cut -c1-200
timeout 120 python3 -m pytest tests/gpu/test_sampler.py tests/gpu/test_tree_kernels.py --tb=short --maxfail=8 -p no:warnings \
  >"$out/sampler_tests.log" 2>&1
echo "== sampler and tree tests ($((SECONDS - start)) s)"; tail -40 "$out/sampler_tests.log" | cut -c1-200
timeout 90 python3 -m bench.kernels_sampler --out "$out" >"$out/sampler.log" 2>&1
echo "== sampler bench ($((SECONDS - start)) s)"; tail -40 "$out/sampler.log" | cut -c1-160
[ "$sweep" = 0 ] && sweep_args="--sweep none --seconds 60" || sweep_args="--sweep cuda --seconds $sweep"
timeout $((sweep + 90)) python3 -m bench.kernels_attention --out "$out" $sweep_args >"$out/attention.log" 2>&1
echo "== attention bench ($((SECONDS - start)) s)"; tail -75 "$out/attention.log" | cut -c1-160
