#!/usr/bin/env bash
# Makes the environment that every target of the Makefile runs in: system libraries, then .venv from the lock file.
# Reuses .venv only while it was made from these very dependency files (their hash is the stamp).
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=$(cat pyproject.toml .ci/requirements.lock .ci/env.sh sglang_basin/__init__.py | sha256sum | cut -c1-16)

# Mooncake's transfer engine links against these (Debian/Ubuntu package names); a C compiler is for SGLang's JIT helpers.
declare -A library=([libibverbs.so.1]=libibverbs1 [librdmacm.so.1]=librdmacm1 [libnuma.so.1]=libnuma1)
missing=()
for so in "${!library[@]}"; do
    /sbin/ldconfig -p | grep -q "^[[:space:]]*$so " || missing+=("${library[$so]}")
done
command -v gcc >/dev/null || missing+=(gcc)
if [ ${#missing[@]} -gt 0 ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "installing system packages: ${missing[*]}"
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
    else
        echo "Missing system packages. Install them, then run make again:" >&2
        echo "    sudo apt-get update && sudo apt-get install -y ${missing[*]}" >&2
        exit 1
    fi
fi

[ "$(cat .venv/.basin-stamp 2>/dev/null)" = "$stamp" ] && exit 0

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "Python 3.11 or newer is needed; name one with: make PYTHON=/usr/bin/python3.11 $*" >&2
    exit 1
fi
echo "making .venv (a first run downloads about 6 GB; later ones take half a minute)"
rm -rf .venv
"$python" -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check uv
# uv keeps its own cache and links from it, so a second checkout costs seconds and little disk.
VIRTUAL_ENV=$PWD/.venv .venv/bin/uv pip install --quiet --requirement .ci/requirements.lock
VIRTUAL_ENV=$PWD/.venv .venv/bin/uv pip install --quiet --no-deps --no-build-isolation --editable .
# Write the bytecode of what an engine imports (8,000 modules, half a minute) once, here, instead of in the three
# processes of each server that starts first.
PYTHONDONTWRITEBYTECODE= .venv/bin/python -W ignore -c "
import sglang.srt.entrypoints.http_server, sglang.srt.managers.detokenizer_manager, sglang.srt.models.qwen3" >/dev/null 2>&1
echo "$stamp" > .venv/.basin-stamp
