{{/* Names and labels. A component is router, prefill, decode, worker, controller or redis. */}}

{{/* The components of workers: one for each role, or one for both where a controller changes roles. */}}
{{- define "baton.workers" -}}
{{- if eq .Values.autoscaling.mode "baton" -}}["worker"]{{- else -}}["prefill","decode"]{{- end -}}
{{- end -}}

{{/* The name of a component's group of the RayCluster, which all models share. */}}
{{- define "baton.rayGroup" -}}
{{- with .root.modelKey -}}{{ . }}-{{- end -}}{{ .component }}
{{- end -}}

{{/* "true" where a controller changes the number of workers, else empty. */}}
{{- define "baton.resizes" -}}
{{- if and (eq .Values.autoscaling.mode "baton") (gt (int .Values.autoscaling.baton.maxWorkers) 0) -}}true{{- end -}}
{{- end -}}

{{/* The name of what all models of a release share. */}}
{{- define "baton.release" -}}
{{- if contains "baton" .Release.Name -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}{{ printf "%s-baton" .Release.Name | trunc 40 | trimSuffix "-" }}{{- end -}}
{{- end -}}

{{/* The name of what one model has. */}}
{{- define "baton.fullname" -}}
{{- $release := include "baton.release" . -}}
{{- with .modelKey -}}{{ $release | trunc (sub 39 (len .) | int) | trimSuffix "-" }}-{{ . }}
{{- else -}}{{ $release }}{{- end -}}
{{- end -}}

{{/* The name of a model's cluster on a Redis server, which releases of other namespaces may share.
It has at most 64 characters. */}}
{{- define "baton.cluster" -}}
{{- $whole := printf "%s_%s" .Release.Namespace (include "baton.fullname" .) -}}
{{- if gt (len $whole) 64 -}}{{ $whole | trunc 55 }}_{{ $whole | sha256sum | trunc 8 }}
{{- else -}}{{ $whole }}{{- end -}}
{{- end -}}

{{/* The label that tells a model's pods from those of others of the release. */}}
{{- define "baton.appName" -}}
baton{{- with .modelKey -}}-model-{{ . }}{{- end -}}
{{- end -}}

{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ include "baton.appName" .root }}
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
{{ .Values.secrets.existing | default (printf "%s-secrets" (include "baton.release" .)) }}
{{- end -}}

{{/* The Secret of a component's certificate: tls.crt, tls.key, ca.crt. A worker of both roles has
that of decode workers, a controller that of routers: it only calls. All Redis servers have one. That
of ray is an authority, which issues to each pod of Ray a certificate with the pod's address. */}}
{{- define "baton.certificate" -}}
{{- $component := get (dict "worker" "decode" "controller" "router" "ray-redis" "redis") .component | default .component -}}
{{- $given := get .root.Values.tls.existingSecrets $component -}}
{{ $given | default (printf "%s-%s-tls" (include "baton.release" .root) $component) }}
{{- end -}}

{{/* The name in all workers' certificates: pods come and go, so addresses are not in them. */}}
{{- define "baton.serverName" -}}
{{ include "baton.release" . }}-worker.{{ .Release.Namespace }}
{{- end -}}

{{/* The Redis servers that the release runs: the registry, and the state of Ray's head. */}}
{{- define "baton.redisServers" -}}
{{- $servers := list -}}
{{- if .Values.redis.enabled -}}{{- $servers = append $servers "redis" -}}{{- end -}}
{{- if eq .Values.orchestrator "kuberay" -}}{{- $servers = append $servers "ray-redis" -}}{{- end -}}
{{ toJson $servers }}
{{- end -}}

{{/* What has a certificate of its own; ray: an authority. */}}
{{- define "baton.certified" -}}
{{- $components := list "router" "prefill" "decode" -}}
{{- if include "baton.redisServers" . | fromJsonArray -}}{{- $components = append $components "redis" -}}{{- end -}}
{{- if eq .Values.orchestrator "kuberay" -}}{{- $components = append $components "ray" -}}{{- end -}}
{{ toJson $components }}
{{- end -}}

{{/* How clients call routers: http or https. */}}
{{- define "baton.clientScheme" -}}
http{{ if .Values.router.tlsSecret }}s{{ end }}
{{- end -}}

{{/* The name of a Redis server's Service, which its certificate bears. */}}
{{- define "baton.redisHost" -}}
{{ include "baton.release" .root }}-{{ .server }}.{{ .root.Release.Namespace }}
{{- end -}}

{{/* The URL of a Redis server of the release. */}}
{{- define "baton.redisUrl" -}}
{{ eq .root.Values.tls.mode "off" | ternary "redis" "rediss" }}://{{ include "baton.redisHost" . }}:6379
{{- end -}}

{{- define "baton.registry" -}}
{{- if .Values.redis.enabled -}}
{{ include "baton.redisUrl" (dict "root" . "server" "redis") }}/0
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
