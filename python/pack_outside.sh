#!/usr/bin/env bash
# Packs the kernels of others that machines with torch seldom have, for a GPU machine without a network: CPython 3.12,
# x86-64, CUDA 13, torch 2.11 and what comes with it.
#
#     python/pack_outside.sh DIR                      here; writes DIR/outside.tar.xz, about 70 MB
#     mkdir SITE && tar xJf outside.tar.xz -C SITE    there, where the checkout and the program are too
#     . SITE/env.sh && seamproof nightly --outside --budget 30m --workers 8
#
# Where TORCH_PYTHON names a CPython 3.12 with torch 2.11, setuptools, wheel, nvidia-cuda-crt and nvidia-cuda-cccl,
# DIR/te.tar.xz, 30 MB, is TransformerEngine: unpacked into a folder of its own, and used in the same way. Of its library
# the code of Hopper stays alone, and its extension for torch is built.
#
# cuDNN's `sinks` need another version of cudnn-frontend: put SITE/sinks before SITE in PYTHONPATH for them.
set -euo pipefail
dir=${1:?usage: pack_outside.sh DIR}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
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

[ -n "${TORCH_PYTHON:-}" ] || exit 0
fetch "$dir/wheels-te" transformer-engine==2.20.2 transformer-engine-cu13==2.20.2 einops==0.8.2 pydantic==2.14.4 \
  pydantic-core==2.50.5 annotated-types==0.8.0 typing-inspection==0.4.5 typing-extensions==4.16.0 \
  nvdlfw-inspect==0.2.2 pyyaml==6.0.4 onnx==1.23.2 onnxscript==0.7.2 onnx-ir==1.1.0 ml-dtypes==0.6.0 protobuf==7.36.2
unpack "$dir/wheels-te" "$dir/te"
rm -rf "$dir/te/transformer_engine/jax" "$dir"/te/transformer_engine/wheel_lib/*nccl_ep*
python3 "$here/thin_fatbin.py" "$dir/te/transformer_engine/wheel_lib/libtransformer_engine.so" 90
# The source's own setup asks for torch before it says its name.
"$TORCH_PYTHON" -m pip download -q --no-deps --no-build-isolation --no-binary=:all: -d "$dir" \
  transformer-engine-torch==2.20.2
tar xzf "$dir/transformer_engine_torch-2.20.2.tar.gz" -C "$dir"
PYTHON=$TORCH_PYTHON "$here/build_transformer_engine.sh" "$dir/transformer_engine_torch-2.20.2" "$dir/te"
# Libraries that its own is linked to lie beside torch, and are not looked for there.
cat > "$dir/te/env.sh" <<'SHELL'
site=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" NVTE_FRAMEWORK=pytorch
nvidia=$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])')
export CUDNN_HOME="$nvidia/cudnn"
export LD_LIBRARY_PATH="$nvidia/cudnn/lib:$nvidia/nccl/lib:$nvidia/cu13/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
SHELL
tar c -C "$dir/te" . | xz -T2 -6 > "$dir/te.tar.xz"
ls -l "$dir/te.tar.xz"
