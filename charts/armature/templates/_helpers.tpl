{{/* Labels of every object. */}}
{{- define "armature.labels" -}}
app.kubernetes.io/name: armature
app.kubernetes.io/part-of: armature
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* What selects the servers: of a pool, if it has a name. */}}
{{- define "armature.servers" -}}
app.kubernetes.io/name: armature
app.kubernetes.io/component: server
{{- with .name }}
pool: {{ . }}
{{- end }}
{{- end }}

{{/* A name with the pool's after it. */}}
{{- define "armature.poolName" -}}
{{ .root.Values.name }}{{ with .pool.name }}-{{ . }}{{ end }}
{{- end }}

{{/* The settings of a pool, as variables. */}}
{{- define "armature.settings" -}}
{{- $fixed := ternary (dict "ARMATURE_OFFLINE" "off") (dict) .root.Values.models.hub.enabled }}
{{- range $name, $value := merge (dict) $fixed (.pool.settings | default dict) .root.Values.settings }}
- {name: {{ $name }}, value: {{ toString $value | quote }}}
{{- end }}
{{- end }}

{{/* The init container that copies the model from a store; its command is that of k8s/components/model-fetch/s3. */}}
{{- define "armature.fetch" -}}
{{- $s3 := .root.Values.models.s3 }}
{{- $settings := merge (dict) (.pool.settings | default dict) .root.Values.settings }}
{{- $component := .root.Files.Get "model-fetch-s3.yaml" | fromYaml }}
{{- $container := index $component.spec.template.spec.initContainers 0 }}
- name: model-fetch
  image: {{ $s3.image }}
  imagePullPolicy: IfNotPresent
  command:
    {{- toYaml $container.command | nindent 4 }}
  envFrom:
    - secretRef: {name: {{ $s3.secret }}, optional: true}
  env:
    - {name: ARMATURE_MODEL, value: {{ $settings.ARMATURE_MODEL | quote }}}
    - {name: MODEL_SOURCE, value: {{ $s3.source | quote }}}
    {{- range $container.env }}
    {{- if .value }}
    - {name: {{ .name }}, value: {{ .value | quote }}}
    {{- end }}
    {{- end }}
    - {name: RCLONE_S3_PROVIDER, value: {{ $s3.provider }}}
    {{- with $s3.endpoint }}
    - {name: RCLONE_S3_ENDPOINT, value: {{ . | quote }}}
    {{- end }}
    {{- with $s3.region }}
    - {name: RCLONE_S3_REGION, value: {{ . }}}
    {{- end }}
  resources:
    requests:
      {{- toYaml $s3.resources | nindent 6 }}
    limits:
      {{- toYaml $s3.resources | nindent 6 }}
  terminationMessagePolicy: FallbackToLogsOnError
  securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL]}
  volumeMounts:
    - {name: models, mountPath: /models}
{{- end }}
