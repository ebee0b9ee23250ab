{{/* What all pods have alike. */}}

{{- define "baton.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "baton.podCommon" -}}
automountServiceAccountToken: false
{{ include "baton.podWithAccount" . }}
{{- end -}}

{{/* The same, for a pod that says itself whether its account's token is mounted. */}}
{{- define "baton.podWithAccount" -}}
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "baton.placement" -}}
{{- $pool := get .root.Values (eq .component "worker" | ternary "decode" .component) -}}
{{- with $pool.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $pool.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .root.Values.topologySpread }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "baton.selector" . | nindent 8 }}
{{- end }}
{{- end -}}

{{/* Puts the values of the mapping `own` into `into`, zeros and false too, which `merge` takes for none. */}}
{{- define "baton.put" -}}
{{- range $key, $value := .own }}{{- $_ := set $.into $key $value }}{{- end }}
{{- end -}}

{{/* A setting's value as text. A number of a values file is a float, which Go writes as 1e+06. */}}
{{- define "baton.text" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) -}}{{ printf "%.0f" . }}{{- else -}}{{ . }}{{- end -}}
{{- end -}}

{{/* Settings as `--set` arguments, sorted by name. */}}
{{- define "baton.settings" -}}
{{- range $name, $value := . }}
- {{ printf "--set=%s=%s" $name (include "baton.text" $value) | quote }}
{{- end }}
{{- end -}}

{{/* What a router and a worker get alike: who they are, whom they trust, where they meet. In the
environment, so that `kubectl exec POD -- baton drain WORKER` has it too. */}}
{{- define "baton.commonSettings" -}}
{{- $all := dict "registry.cluster" (include "baton.cluster" .) "registry.location" (include "baton.registry" .) -}}
{{- if ne .Values.tls.mode "off" -}}
{{- $_ := set $all "security.authority" "/etc/baton/tls/ca.crt" -}}
{{- $_ := set $all "security.certificate" "/etc/baton/tls/tls.crt" -}}
{{- $_ := set $all "security.key" "/etc/baton/tls/tls.key" -}}
{{- $_ := set $all "security.server_name" (include "baton.serverName" .) -}}
{{- if .Values.redis.enabled -}}
{{- $_ := set $all "registry.authority" "/etc/baton/tls/ca.crt" -}}
{{- end -}}
{{- else -}}
{{- $_ := set $all "security.tls" "off" -}}
{{- end -}}
{{- with .Values.monitoring.otlpEndpoint -}}
{{- $_ := set $all "telemetry.otlp_endpoint" . -}}
{{- end -}}
{{ toJson $all }}
{{- end -}}

{{- define "baton.commonEnv" -}}
{{- range $name, $value := include "baton.commonSettings" . | fromJson }}
- name: BATON_{{ $name | replace "." "__" | upper }}
  value: {{ $value | quote }}
{{- end }}
{{- include "baton.secretEnv" . | nindent 0 }}
{{- end -}}

{{/* Where a pod is, from its labels. */}}
{{- define "baton.topologyEnv" -}}
{{- $levels := list -}}
{{- range $level, $label := .Values.workers.topologyLabels }}
{{- $levels = append $levels (printf "$(TOPOLOGY_%d)" $level) }}
- name: TOPOLOGY_{{ $level }}
  valueFrom:
    fieldRef: {fieldPath: "metadata.labels['{{ $label }}']"}
{{- end }}
{{- with $levels }}
- name: BATON_TOPOLOGY
  value: {{ join "/" . | quote }}
{{- end }}
{{- end -}}

{{- define "baton.secretEnv" -}}
- name: BATON_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ include "baton.secret" . }}, key: token}
{{- range $name, $key := dict "BATON_TOKEN_ALSO" "token-also" "BATON_IDENTITY_SECRET" "identity-secret" }}
- name: {{ $name }} # there once the token is replaced
  valueFrom:
    secretKeyRef: {name: {{ include "baton.secret" $ }}, key: {{ $key }}, optional: true}
{{- end }}
{{- if or .Values.redis.enabled .Values.redis.url }}
- name: BATON_REGISTRY__PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ include "baton.secret" . }}, key: redis-password, optional: true}
{{- end }}
- name: HOME
  value: /tmp
{{- end -}}

{{- define "baton.volumes" -}}
- name: tmp
  emptyDir: {}
{{- if ne .root.Values.tls.mode "off" }}
- name: tls
  secret:
    secretName: {{ include "baton.certificate" . }}
    defaultMode: 0440
{{- end }}
{{- if not .root.Values.model.embedded }}
- name: models
  {{- if .root.Values.model.volume.hostPath }}
  hostPath: {path: {{ .root.Values.model.volume.hostPath | quote }}, type: Directory}
  {{- else }}
  persistentVolumeClaim:
    claimName: {{ .root.Values.model.volume.existingClaim | default (printf "%s-models" (include "baton.fullname" .root)) }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "baton.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if ne .Values.tls.mode "off" }}
- {name: tls, mountPath: /etc/baton/tls, readOnly: true}
{{- end }}
{{- if not .Values.model.embedded }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end -}}

{{/* Waits for the model that the download job writes; behind the init containers in `first`. */}}
{{- define "baton.modelReady" -}}
{{- if or .first .root.Values.model.repository }}
initContainers:
  {{- with .first }}
  {{- . | nindent 2 }}
  {{- end }}
{{- end }}
{{- if .root.Values.model.repository }}
  - name: model
    image: {{ .image }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    command: [sh, -c]
    args: # sh is process 1, which ignores a signal that it has no handler for
      - trap 'exit 143' TERM; until test -e "{{ include "baton.modelFolder" .root }}/.complete"; do sleep 2; done
    securityContext:
      {{- include "baton.containerSecurity" .root | nindent 6 }}
    resources:
      requests: {cpu: 10m, memory: 16Mi}
      limits: {memory: 64Mi}
    volumeMounts:
      - {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end -}}
