#!/usr/bin/env bash
# Builds the extension of TransformerEngine for torch, from its source, with the headers of torch and CUDA that the
# interpreter finds. No nvcc, and no network. It takes about ten minutes of one core: MAX_JOBS says how many at a time.
#
#     python/build_transformer_engine.sh SOURCE SITE    SOURCE: transformer_engine_torch-VERSION; the extension goes to SITE
#
# PYTHON names another interpreter. Headers of CUDA are those of its packages, to which nvidia-cuda-crt and
# nvidia-cuda-cccl belong, then those of CUDA_HOME.
set -euo pipefail
source=${1:?usage: build_transformer_engine.sh SOURCE SITE} site=${2:?usage: build_transformer_engine.sh SOURCE SITE}
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
{ read -r torch; read -r include; read -r suffix; read -r nvidia; } < <("${PYTHON:-python3}" - <<'PYTHON'
import importlib.util, pathlib, sysconfig

found = importlib.util.find_spec("nvidia")
print(pathlib.Path(importlib.util.find_spec("torch").origin).parent)
print(sysconfig.get_paths()["include"])
print(sysconfig.get_config_var("EXT_SUFFIX"))
print(list(found.submodule_search_locations)[0] if found else "")
PYTHON
)
flags=(-O1 -g0 -fPIC -fvisibility=hidden -std=c++17 -w -DTORCH_API_INCLUDE_EXTENSION_H
  -DTORCH_EXTENSION_NAME=transformer_engine_torch)
for part in common_headers common_headers/common common_headers/common/include csrc; do flags+=("-I$source/$part"); done
flags+=(-isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include" "-I$include")
for root in "$nvidia"/cu13 "$nvidia"/cudnn "$nvidia"/nccl "${CUDA_HOME:-/usr/local/cuda}"; do
  for place in "$root/include" "$root/include/cccl"; do [ -d "$place" ] && flags+=("-I$place"); done
done
# All sources include the same headers, which take a minute to read.
printf '#include <%s>\n' pybind.h extensions.h torch/extension.h > "$build/all.h"
g++ "${flags[@]}" -x c++-header "$build/all.h" -o "$build/all.h.gch"
find "$source/csrc" -name '*.cpp' -print0 | xargs -0 -P "${MAX_JOBS:-$(nproc)}" -I{} sh -c \
  'file=$1; build=$2; shift 2; exec g++ "$@" -include "$build/all.h" -c "$file" -o "$build/$(basename "$file" .cpp).o"' \
  sh {} "$build" "${flags[@]}"
g++ -shared -o "$site/transformer_engine_torch$suffix" "$build"/*.o -L"$torch/lib" -lc10 -ltorch -ltorch_cpu -ltorch_python \
  -lc10_cuda -ltorch_cuda
