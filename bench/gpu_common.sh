# Sourced by the gpu*.sh: the environment, and the build. Needs torch, cmake, ninja, pybind11 and nvcc; installs nothing.
#   start_build LOG    builds tlt_engine/_C with CUDA in the background, in $TLT_BUILD (default /tmp/build), for this GPU
#   wait_for_build     until it is there; on failure prints the log's end and exits
#   part NAME SECONDS LINES COMMAND...    runs COMMAND for at most SECONDS into $out/NAME.log, prints its last LINES
export PATH=/usr/local/cuda/bin:$PATH TMPDIR=/tmp PYTHONPATH=.:kernels${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
TLT_BUILD=${TLT_BUILD:-/tmp/build}

start_build() {
  build_log=$1
  local arch
  arch=$(python3 -c "import torch; print('%d%d' % torch.cuda.get_device_capability())")
  (cmake -S . -B "$TLT_BUILD" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTLT_CUDA=1 -DTLT_OUTPUT_DIR="$PWD/tlt_engine" \
    -DCMAKE_CUDA_ARCHITECTURES="$arch" -DPython_EXECUTABLE="$(which python3)" \
    -Dpybind11_DIR="$(python3 -m pybind11 --cmakedir)" && cmake --build "$TLT_BUILD") >"$build_log" 2>&1 &
  build=$!
}

wait_for_build() {
  wait "$build" || { grep -n "error\|FAILED" "$build_log" | head -20; tail -5 "$build_log"; exit 1; }
  echo "== built ($SECONDS s)"
}

part() {
  local name=$1 limit=$2 lines=$3 begin=$SECONDS rc
  shift 3
  timeout "$limit" "$@" >"$out/$name.log" 2>&1
  rc=$?
  echo "== $name: exit $rc, $((SECONDS - begin)) s, at $SECONDS s"
  grep -v "^\s*$\|Warning\|warner" "$out/$name.log" | tail -"$lines" | cut -c1-170
}
