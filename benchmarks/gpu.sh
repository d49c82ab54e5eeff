#!/usr/bin/env bash
# All measurements on one GPU, in under 8 minutes after installation; the table on standard output, the figures in gpu.json.
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -m pip install --quiet uv
exec uv run --extra cuda python benchmarks/gpu.py --json "${1:-gpu.json}"
