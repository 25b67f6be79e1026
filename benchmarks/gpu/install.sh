#!/bin/sh
# Makes venv/ beside the torch of PYTHON (default: python3). It needs no network.
set -e
cd "$(dirname "$0")/../.."
"${PYTHON:-python3}" -m venv --system-site-packages venv
venv/bin/python -m pip install -q --no-index --find-links wheels -r requirements.txt
where='import sysconfig; print(sysconfig.get_path("purelib"))'
ours="$(venv/bin/python -c "$where")" theirs="$("${PYTHON:-python3}" -c "$where")"
# PYTHON may be of an environment itself, whose packages come after this one's.
printf '%s\n' "$PWD" "$theirs" > "$ours/rose.pth"
# cuda-python looks for NVRTC in this environment's own folders, whatever a .pth file names.
if [ -d "$theirs/nvidia" ] && [ ! -e "$ours/nvidia" ]; then ln -s "$theirs/nvidia" "$ours/nvidia"; fi
# vLLM finds plugins by the metadata of packages.
venv/bin/python setup.py -q egg_info
# The extensions are compiled for one Python; another one compiles them here, with its compiler.
venv/bin/python -c 'import rose._shm, rose._vmm, rose._delta' 2>/dev/null ||
    venv/bin/python setup.py -q build_ext --inplace
venv/bin/python -c 'import rose._shm, rose._vmm, rose._delta, torch; print("ready, torch", torch.__version__)'
