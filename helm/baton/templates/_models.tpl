{{/* Renders `objects` for the release's own model, then for each of `models`. A further model has the
values of the release but for its model and routes, and what it gives itself. */}}
{{- define "baton.eachModel" -}}
{{- $root := .root -}}
{{- $objects := .objects -}}
{{ include $objects $root }}
{{- range $key, $own := $root.Values.models }}
---
{{ include $objects (dict
  "modelKey" $key
  "Values" (include "baton.modelValues" (dict "root" $root "own" $own) | fromJson)
  "Release" $root.Release "Chart" $root.Chart "Files" $root.Files "Capabilities" $root.Capabilities "Template" $root.Template
) }}
{{- end }}
{{- end -}}

{{- define "baton.modelValues" -}}
{{- $none := dict
  "model" (dict "name" "" "embedded" false "path" "" "repository" "" "revision" "main" "tokenSecret" "" "kvHeads" 0 "volume" (merge (dict "existingClaim" "" "hostPath" "") .root.Values.model.volume))
  "ingress" (merge (dict "enabled" false "host" "") .root.Values.ingress)
  "httpRoute" (merge (dict "enabled" false "hostname" "") .root.Values.httpRoute) -}}
{{- $base := merge $none (omit .root.Values "models" "model" "ingress" "httpRoute") -}}
{{ include "baton.overlay" (dict "base" $base "own" .own) }}
{{- end -}}

{{/* A mapping with the values of another one put into it, zeros and false too, as JSON. */}}
{{- define "baton.overlay" -}}
{{- $whole := deepCopy .base -}}
{{- range $key, $value := .own -}}
{{- if and (kindIs "map" $value) (kindIs "map" (get $whole $key)) -}}
{{- $_ := set $whole $key (include "baton.overlay" (dict "base" (get $whole $key) "own" $value) | fromJson) -}}
{{- else -}}
{{- $_ := set $whole $key $value -}}
{{- end -}}
{{- end -}}
{{ toJson $whole }}
{{- end -}}
