#!/usr/bin/env bash
# Pins the development environment. Run by hand when pyproject.toml's dependencies change.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/uv pip compile --quiet --no-header --no-annotate --python-version 3.11 --no-emit-index-url \
    --extra cpu --extra dev pyproject.toml --output-file .ci/requirements.lock
