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
