{{/* Renders `objects` for the release's own model, then for each of `models`. A further model has the
values of the release but for its model and routes, and what it gives itself; `release` is the scope
of the release, `modelNumber` counts from 1. `separator` stands between two models, if not `---`. */}}
{{- define "baton.eachModel" -}}
{{- $root := .root -}}
{{- $objects := .objects -}}
{{- $separator := hasKey . "separator" | ternary .separator "---" -}}
{{- $number := 0 -}}
{{ include $objects $root }}
{{- range $key, $own := $root.Values.models }}
{{- $number = add1 $number }}
{{ $separator }}
{{ include $objects (dict
  "modelKey" $key
  "modelNumber" $number
  "release" $root
  "Values" (include "baton.modelValues" (dict "root" $root "own" $own) | fromJson)
  "Release" $root.Release "Chart" $root.Chart "Files" $root.Files "Capabilities" $root.Capabilities "Template" $root.Template
) }}
{{- end }}
{{- end -}}

{{- define "baton.modelValues" -}}
{{- /* `set` and not `merge`, for which an empty value is none */ -}}
{{- $volume := deepCopy .root.Values.model.volume -}}
{{- $_ := set (set $volume "existingClaim" "") "hostPath" "" -}}
{{- $ingress := deepCopy .root.Values.ingress -}}
{{- $_ := set (set $ingress "enabled" false) "host" "" -}}
{{- $route := deepCopy .root.Values.httpRoute -}}
{{- $_ := set (set $route "enabled" false) "hostname" "" -}}
{{- $model := dict "name" "" "embedded" false "path" "" "repository" "" "revision" "main" "tokenSecret" "" "kvHeads" 0 "heads" 0 "volume" $volume -}}
{{- $none := dict "model" $model "ingress" $ingress "httpRoute" $route -}}
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
