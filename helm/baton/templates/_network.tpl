{{/* Peers and egress of the network policies. */}}

{{- define "baton.pods" -}}
- podSelector:
    matchLabels:
      app.kubernetes.io/name: {{ include "baton.appName" (hasKey . "modelKey" | ternary . .root) }}
      app.kubernetes.io/instance: {{ .root.Release.Name }}
    matchExpressions:
      - {key: app.kubernetes.io/component, operator: In, values: {{ toJson .components }}}
{{- end }}

{{/* Names, the registry and the collector. */}}
{{- define "baton.egress" -}}
- ports:
    {{- toYaml .dns | nindent 4 }}
{{- if .root.Values.redis.enabled }}
- to:
    {{- include "baton.pods" (dict "root" .root "modelKey" "" "components" (list "redis")) | nindent 4 }}
  ports:
    - {protocol: TCP, port: 6379}
{{- else }}
- ports:
    - {protocol: TCP, port: {{ regexReplaceAll "^[a-z]+://([^/]*@)?" .root.Values.redis.url "" | regexFind "^[^/?]*" | regexFind ":[0-9]+$" | trimPrefix ":" | default "6379" }}}
{{- end }}
{{- with .root.Values.monitoring.otlpEndpoint }}
- ports:
    - {protocol: TCP, port: {{ regexFind "[0-9]+$" . }}}
{{- end }}
{{- end }}
