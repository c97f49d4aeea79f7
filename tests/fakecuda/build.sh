#!/usr/bin/env bash
# build.sh VENV: builds the stand-in (autotune/stand_in) and puts it where the venv's torch, a build for CUDA, looks for
# CUDA's libraries. Needs g++, binutils and a package index; takes half a minute.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$1/bin/python
site=$("$python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
"$python" -m autotune.stand_in.build "$site/torch/lib"
cp tests/fakecuda/loader.py "$site/fakecuda_loader.py"
echo "import fakecuda_loader" > "$site/fakecuda.pth"
