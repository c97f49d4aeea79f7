#!/usr/bin/env bash
# build.sh VENV: builds the stand-in and puts it where the venv's torch, a build for CUDA, looks for CUDA's libraries.
# Needs g++, binutils and a package index; takes half a minute.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=$1/bin/python
site=$("$python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
lib=$site/torch/lib
cuda=$("$python" -c "import runpy, sys; print(runpy.run_path(sys.argv[1])['cuda'] or '')" "$site/torch/version.py")
if [[ -z $cuda ]]; then
    echo "build.sh: the torch of $1 is no build for CUDA" >&2
    exit 2
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Headers, whose structures and enumerations differ between versions; nothing else of NVIDIA's is used.
major=${cuda%%.*}
case $major in
12) packages=("nvidia-cuda-runtime-cu12==$cuda.*" "nvidia-cuda-nvcc-cu12==$cuda.*") headers=cuda_runtime ;;
*) packages=("nvidia-cuda-runtime==$cuda.*" "nvidia-cuda-crt==$cuda.*") headers=cu$major ;;
esac
"$python" -m pip install --quiet --no-deps --target "$work/headers" "${packages[@]}"
flags=("-DCUDA_MAJOR=$major" -std=c++17 -O2 -Wall -Wno-deprecated-declarations -shared -fPIC "-Wl,-rpath,\$ORIGIN")
for folder in "$headers" cuda_nvcc; do flags+=(-I"$work/headers/nvidia/$folder/include"); done

rm -f "$lib"/lib{cuda.so.1,cudart.so."$major",nvidia-ml.so.1,fakecuda-warp.so} # an old one may be loaded somewhere: leave it alone
cd "$here"
g++ "${flags[@]}" device.cpp clock.cpp driver.cpp -o "$lib/libcuda.so.1" -Wl,-soname,libcuda.so.1 -lpthread -ldl
g++ -std=c++17 -O2 -Wall -shared -fPIC warp.cpp -o "$lib/libfakecuda-warp.so" -lpthread -ldl
echo "libcudart.so.$major { global: *; };" > "$work/cudart.map"
g++ "${flags[@]}" -fvisibility=hidden runtime.cpp streams.cpp graphs.cpp launches.cpp durations.cpp "$lib/libcuda.so.1" \
    -o "$lib/libcudart.so.$major" -Wl,-soname,"libcudart.so.$major" -Wl,--version-script,"$work/cudart.map"
g++ "${flags[@]}" -fvisibility=hidden nvml.cpp -o "$lib/libnvidia-ml.so.1" -Wl,-soname,libnvidia-ml.so.1
"$python" stubs.py "$site" "$work" "$lib/libcuda.so.1"
cp loader.py "$site/fakecuda_loader.py"
echo "import fakecuda_loader" > "$site/fakecuda.pth"
