#!/usr/bin/env bash
# Packs the kernels of others that machines with torch seldom have, for a GPU machine without a network: CPython 3.12,
# x86-64, CUDA 13, torch 2.11 and what comes with it.
#
#     python/pack_outside.sh DIR                      here; writes DIR/outside.tar.xz, about 70 MB
#     mkdir SITE && tar xJf outside.tar.xz -C SITE    there, where the checkout and the program are too
#     . SITE/env.sh && seamproof nightly --outside --budget 30m --workers 8
#
# cuDNN's `sinks` need another version of cudnn-frontend: put SITE/sinks before SITE in PYTHONPATH for them.
set -euo pipefail
dir=${1:?usage: pack_outside.sh DIR}
mkdir -p "$dir/wheels" "$dir/site/sinks"

# fetch FOLDER PACKAGE…: wheels for that machine, without what they need.
fetch() {
  local folder=$1
  shift
  local platforms=(--platform any)
  for glibc in 17 24 27 28; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
  python3 -m pip download -q --pre --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${platforms[@]}" --platform manylinux2014_x86_64 -d "$folder" "$@"
}

# unpack FOLDER SITE
unpack() {
  for wheel in "$1"/*.whl; do python3 -m zipfile -e "$wheel" "$2"; done
}

fetch "$dir/wheels" nvidia-cudnn-frontend==1.18.0 ring-flash-attn==0.1.8 yunchang==0.6.4 flash-attn-4==4.0.0b36 \
  nvidia-cutlass-dsl==4.8.1 nvidia-cutlass-dsl-libs-base==4.8.1 nvidia-cutlass-dsl-libs-core==4.8.1 \
  nvidia-cutlass-dsl-libs-cu13==4.8.1 quack-kernels==0.6.5 apache-tvm-ffi==0.1.15.post2 torch-c-dlpack-ext==0.1.5
unpack "$dir/wheels" "$dir/site"
fetch "$dir/wheels-sinks" nvidia-cudnn-frontend==1.20.0
unpack "$dir/wheels-sinks" "$dir/site/sinks"
# Of vLLM one extension is needed, 150 MB of 500.
fetch "$dir/wheels-vllm" --abi abi3 vllm==0.24.0
python3 - "$dir" <<'PYTHON'
import pathlib, sys, zipfile

folder = pathlib.Path(sys.argv[1])
(wheel,) = (folder / "wheels-vllm").glob("vllm-*.whl")
name = "_vllm_fa3_C.abi3.so"
(folder / "site" / name).write_bytes(zipfile.ZipFile(wheel).read(f"vllm/vllm_flash_attn/{name}"))
PYTHON

# A file *.pth, which would name the folder of cutlass, is read in site-packages alone.
cat > "$dir/site/env.sh" <<'SHELL'
site=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHONPATH="$site:$site/nvidia_cutlass_dsl/dsl_packages${PYTHONPATH:+:$PYTHONPATH}"
export VLLM_FLASH_ATTENTION_3="$site/_vllm_fa3_C.abi3.so"
SHELL
tar c -C "$dir/site" --exclude=iket --exclude=3rdparty --exclude='*.a' . |
  xz -T2 --x86 --lzma2=preset=9,dict=128MiB > "$dir/outside.tar.xz"
ls -l "$dir/outside.tar.xz"
