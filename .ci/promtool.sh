#!/usr/bin/env bash
# Puts promtool, which checks the alert rules under docker/, into .venv/bin unless the machine has one. Debian's package
# would bring a Prometheus server along and start it, so this takes the one program out of it.
set -euo pipefail
cd "$(dirname "$0")/.."

command -v promtool >/dev/null && exit 0
[ -x .venv/bin/promtool ] && exit 0
if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
    echo "promtool is missing and the tests of the alert rules need it; it is part of the package prometheus" >&2
    exit 1
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
chmod 755 "$folder"  # apt downloads as a user of its own
cd "$folder"
apt-get download -qq prometheus >/dev/null 2>&1 || { apt-get update -qq && apt-get download -qq prometheus >/dev/null; }
dpkg-deb --extract prometheus_*.deb .
cd - >/dev/null
install -m 755 "$folder/usr/bin/promtool" .venv/bin/promtool
