{{/* Names and labels. A component is router, prefill, decode or redis. */}}

{{- define "baton.fullname" -}}
{{- if contains "baton" .Release.Name -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}{{ printf "%s-baton" .Release.Name | trunc 40 | trimSuffix "-" }}{{- end -}}
{{- end -}}

{{- define "baton.selector" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "baton.metadata" -}}
name: {{ include "baton.fullname" .root }}-{{ .component }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "baton.labels" . | nindent 2 }}
{{- end -}}

{{/* The Secret of token, API keys and Redis password. */}}
{{- define "baton.secret" -}}
{{ .Values.secrets.existing | default (printf "%s-secrets" (include "baton.fullname" .)) }}
{{- end -}}

{{/* The Secret of a component's certificate: tls.crt, tls.key, ca.crt. */}}
{{- define "baton.certificate" -}}
{{- $given := get .root.Values.tls.existingSecrets .component -}}
{{ $given | default (printf "%s-%s-tls" (include "baton.fullname" .root) .component) }}
{{- end -}}

{{/* The name in all workers' certificates: pods come and go, so addresses are not in them. */}}
{{- define "baton.serverName" -}}
{{ include "baton.fullname" . }}-worker.{{ .Release.Namespace }}
{{- end -}}

{{- define "baton.registry" -}}
{{- if .Values.redis.enabled -}}
redis://{{ include "baton.fullname" . }}-redis.{{ .Release.Namespace }}:6379/0
{{- else -}}{{ .Values.redis.url }}{{- end -}}
{{- end -}}

{{- define "baton.modelFolder" -}}
{{- if .Values.model.embedded -}}/opt/baton/baton-tiny
{{- else if .Values.model.repository -}}
/models/{{ .Values.model.repository | replace "/" "--" }}@{{ .Values.model.revision }}
{{- else -}}/models/{{ .Values.model.path | trimPrefix "/" }}{{- end -}}
{{- end -}}

{{- define "baton.modelName" -}}
{{- if .Values.model.name -}}{{ .Values.model.name }}
{{- else if .Values.model.embedded -}}baton-tiny
{{- else -}}{{ .Values.model.repository | default .Values.model.path | base }}{{- end -}}
{{- end -}}
