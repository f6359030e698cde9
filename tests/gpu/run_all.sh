#!/usr/bin/env bash
# Everything that is checked and timed on a GPU, on a bare machine: CUDA 13, Python with NumPy (and PyTorch, for one
# figure); no network, no compiler. tests/gpu/pack.py has made the folder beforehand, where there is no GPU.
#
#   tests/gpu/run_all.sh [PACK [OUT]]      build/gpu and build/gpu-results unless given
#
# CHECKS and TIMES may hold options for check_models.py and time_models.py.
# Kernels against their meaning, what goes by NCCL, models against the CPU, then times, PyTorch's beside them. One table
# on the screen; OUT has it, and the JSON of each part. Ends with 1 if something differs.
set -uo pipefail
cd "$(dirname "$0")/../.."
pack=${1:-build/gpu}
out=${2:-build/gpu-results}
mkdir -p "$out"

# Beside the packages of whatever python3 is, in a folder: an environment of its own would not see another's NumPy.
rm -rf "$out/site"
python3 -m pip install --quiet --no-index --find-links "$pack/wheels" --no-deps --target "$out/site" \
  $(for wheel in "$pack"/wheels/*.whl; do basename "$wheel" | cut -d- -f1; done | sort -u) || exit 1
export PYTHONPATH="$out/site"
for lib in /usr/local/cuda/lib64 /usr/local/cuda/lib; do
  [ -e "$lib/libcudart.so.13" ] && export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$lib"
done

failed=0
part() {
  echo "== $1"
  python3 "tests/gpu/$1.py" "$pack" --json "$out/$1.json" "${@:2}" || failed=1
}
{
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv,noheader 2> /dev/null
  part check_kernels
  part check_nccl
  part check_models ${CHECKS:-}
  part time_models ${TIMES:-}
  part time_torch
  [ "$failed" = 0 ]
} 2>&1 | tee "$out/table.txt"
exit "${PIPESTATUS[0]}"
