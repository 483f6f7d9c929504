#!/usr/bin/env bash
# Installs into build/checkers the programs with which tests/deploy checks the Dockerfile, the manifests, the rules and
# the dashboards. This never fails: a tool that cannot be installed is named, and the tests that need it are skipped by
# name.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
into=build/checkers
# Schemas of custom resources (Prometheus operator, KEDA, Gateway API), Grafana's types with a compiler that checks
# dashboards, and axe, which checks that the web page is accessible.
schemas=(@kubernetes-models/prometheus-operator@6.0.0 @kubernetes-models/keda@2.0.0 @kubernetes-models/gateway-api@2.0.0
  @grafana/schema@13.2.3 typescript@5.9.3 axe-core@4.14.1)
# Definitions (CRDs) of custom resources, from raw.githubusercontent.com. Tests use those without schemas on npm; the
# proof's cluster uses all.
definitions=(kubernetes-sigs/gateway-api-inference-extension/v1.6.0/config/crd/bases/inference.networking.k8s.io_inferencepools.yaml
  kubernetes-sigs/gateway-api/v1.5.0/config/crd/standard/gateway.networking.k8s.io_{gateways,httproutes}.yaml
  aws/karpenter-provider-aws/v1.14.1/pkg/apis/crds/karpenter.{sh_nodepools,k8s.aws_ec2nodeclasses}.yaml
  kedacore/keda/v2.20.2/config/crd/bases/keda.sh_scaledobjects.yaml
  kserve/kserve/v0.20.0/config/crd/full/serving.kserve.io_{clusterservingruntimes,inferenceservices}.yaml
  kserve/kserve/v0.20.0/config/crd/full/llmisvc/serving.kserve.io_llminferenceservices.yaml
  prometheus-operator/prometheus-operator/v0.93.0/example/prometheus-operator-crd/monitoring.coreos.com_{podmonitors,prometheusrules,servicemonitors}.yaml)

missing=0
say() { echo "checkers: $*" >&2; missing=1; }

python_tools() {
  cmp -s requirements/checkers.txt "$into/checkers.txt" && return
  python3 -m venv "$into/venv" && "$into/venv/bin/pip" install -q --no-compile -r requirements/checkers.txt && cp requirements/checkers.txt "$into/checkers.txt"
}

node_schemas() {
  local stamp="$into/node_modules/checkers.txt"
  [ "$(cat "$stamp" 2>/dev/null)" = "${schemas[*]}" ] && return
  npm install --silent --no-audit --no-fund --no-save --prefix "$into" "${schemas[@]}" && echo "${schemas[*]}" >"$stamp"
}

custom_resources() {
  local stamp="$into/crds/checkers.txt" each
  [ "$(cat "$stamp" 2>/dev/null)" = "${definitions[*]}" ] && return
  mkdir -p "$into/crds"
  for each in "${definitions[@]}"; do
    curl -fsSL --remove-on-error --connect-timeout 5 --max-time 60 -o "$into/crds/${each##*/}" "https://raw.githubusercontent.com/$each" || return
  done
  echo "${definitions[*]}" >"$stamp"
}

# Prints the Debian and Ubuntu packages of missing programs.
absent() {
  local pair
  for pair in promtool:prometheus amtool:prometheus-alertmanager nginx:nginx-light chromium:chromium; do
    command -v "${pair%%:*}" >/dev/null || [ -x "/usr/sbin/${pair%%:*}" ] || echo "${pair##*:}"
  done
}

# Only continuous integration installs system packages without asking.
system_tools() {
  local packages
  mapfile -t packages < <(absent)
  [ ${#packages[@]} -eq 0 ] && return
  if [ "${CI:-}" = true ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update -q && apt-get install -y -q --no-install-recommends "${packages[@]}"; } >/dev/null || say "apt could not install ${packages[*]}"
  else
    say "missing: ${packages[*]}. On Debian and Ubuntu: sudo apt install ${packages[*]}"
  fi
}

mkdir -p "$into"
python_tools || say "no hadolint, checkov, kubernetes-validate, check-jsonschema, shellcheck and zizmor: pip could not install them"
if command -v npm >/dev/null; then
  node_schemas || say "no schemas of custom resources and dashboards and no axe: npm could not install them"
else
  say "no schemas of custom resources and dashboards and no axe: npm is missing"
fi
custom_resources 2>/dev/null || say "no definitions of custom resources, of InferencePool and KServe's kinds among them: curl could not download them"
system_tools
command -v kubectl >/dev/null || command -v kustomize >/dev/null || say "neither kubectl nor kustomize: tests of the built manifests are skipped"
[ "$missing" = 0 ] && echo "checkers: complete, in $into and on the PATH"
exit 0
