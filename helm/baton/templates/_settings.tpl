{{/* The `settings` of routers and workers: names and values of settings.json, which `make settings`
generates from runtime/config.py, but for what the chart sets itself. */}}

{{/* Fails for a value that a setting cannot have. */}}
{{- define "baton.checkSetting" -}}
{{- $text := include "baton.text" .value -}}
{{- $known := .known -}}
{{- $fits := true -}}
{{- if $known.allowed -}}
{{- $fits = has $text $known.allowed -}}
{{- else if $known.pattern -}}
{{- $fits = regexMatch $known.pattern $text -}}
{{- end -}}
{{- if and $fits (hasKey $known "low") -}}
{{- $number := $text | replace "_" "" | float64 -}}
{{- $fits = and (ge $number (float64 $known.low)) (le $number (float64 $known.high)) -}}
{{- end -}}
{{- if not $fits -}}
{{- include "baton.fail" (list .root (printf "%s has %s: %s; give %s" .section .name $text $known.words)) -}}
{{- end -}}
{{- end -}}

{{- define "baton.checkSettings" -}}
{{- /* Settings that the chart gives to processes, each with what to set instead, if anything. */ -}}
{{- $files := "tls.mode and tls.existingSecrets" -}}
{{- $owned := dict
  "registry.cluster" ""
  "registry.location" "redis.url"
  "registry.password" "the Secret of secrets.existing"
  "router.api_keys" "the Secret of secrets.existing"
  "router.drain_s" "router.drainSeconds"
  "router.grpc_port" "router.grpcPort"
  "router.host" ""
  "router.leave_s" "router.leaveSeconds"
  "router.port" "router.port"
  "router.tls" "router.tlsSecret"
  "security.authority" $files
  "security.certificate" $files
  "security.key" $files
  "security.server_name" ""
  "security.tls" "tls.mode"
  "worker.admin_port" "workers.adminPort"
  "worker.advertise" ""
  "worker.drain_s" "workers.drainSeconds"
  "worker.ep" "prefill.ep and decode.ep"
  "worker.host" ""
  "worker.port" "workers.port"
  "worker.tp" "prefill.tp and decode.tp"
-}}
{{- if .Values.redis.enabled -}}{{- $_ := set $owned "registry.authority" "" -}}{{- end -}}
{{- if .Values.monitoring.otlpEndpoint -}}{{- $_ := set $owned "telemetry.otlp_endpoint" "monitoring.otlpEndpoint" -}}{{- end -}}
{{- $known := .Files.Get "settings.json" | fromJson -}}
{{- range $section, $settings := dict "router.settings" .Values.router.settings "workers.settings" .Values.workers.settings "prefill.settings" .Values.prefill.settings "decode.settings" .Values.decode.settings -}}
{{- range $name, $value := $settings -}}
{{- if hasKey $owned $name -}}
{{- $instead := get $owned $name -}}
{{- include "baton.fail" (list $ (printf "%s has %s, which the chart sets itself; remove it%s" $section $name ($instead | empty | ternary "" (printf ", and use %s" $instead)))) -}}
{{- end -}}
{{- if not (hasKey $known $name) -}}
{{- include "baton.fail" (list $ (printf "%s has %s, which is no setting of Baton; remove it, or take the name from docs/settings.md" $section $name)) -}}
{{- end -}}
{{- include "baton.checkSetting" (dict "root" $ "section" $section "name" $name "value" $value "known" (get $known $name)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
