{{/* Bounds of single values (bounds.yaml). Each message names the value and the remedy. */}}

{{/* What is at a path of values, as JSON of {value}; "" where nothing is. */}}
{{- define "baton.at" -}}
{{- $value := .values -}}
{{- range splitList "." .path -}}
{{- if kindIs "map" $value -}}{{- $value = get $value . -}}{{- else -}}{{- $value = "" -}}{{- end -}}
{{- end -}}
{{- dict "value" $value | toJson -}}
{{- end -}}

{{/* "is 5", or "is not set". */}}
{{- define "baton.isWhat" -}}
{{- if or (kindIs "invalid" .) (eq (toString .) "") -}}is not set{{- else -}}is {{ include "baton.text" . }}{{- end -}}
{{- end -}}

{{- define "baton.checkForm" -}}
{{- if not (regexMatch .form.pattern (toString .value)) -}}
{{- $what := .form.hidden | default false | ternary "has another form" (include "baton.isWhat" .value) -}}
{{- include "baton.fail" (list .root (printf "%s %s; give %s" .path $what .form.words)) -}}
{{- end -}}
{{- end -}}

{{- define "baton.checkBounds" -}}
{{- $bounds := .Files.Get "bounds.yaml" | fromYaml -}}
{{- range $path, $bound := $bounds.numbers -}}
{{- $value := (include "baton.at" (dict "values" $.Values "path" $path) | fromJson).value -}}
{{- $is := include "baton.isWhat" $value -}}
{{- $number := float64 $value -}}
{{- $first := float64 (index $bound 0) -}}
{{- $reason := and (eq (len $bound) 3) (lt $number $first) | ternary (printf ", but %v" (last $bound)) "" -}}
{{- if or (eq $is "is not set") (lt $number $first) (gt $number (float64 (index $bound 1))) -}}
{{- include "baton.fail" (list $ (printf "%s %s%s; give a number from %s to %s" $path $is $reason (include "baton.text" (index $bound 0)) (include "baton.text" (index $bound 1)))) -}}
{{- end -}}
{{- end -}}
{{- range $path, $allowed := $bounds.choices -}}
{{- $value := (include "baton.at" (dict "values" $.Values "path" $path) | fromJson).value -}}
{{- if not (has $value $allowed) -}}
{{- include "baton.fail" (list $ (printf "%s %s; give one of %s%s" $path (include "baton.isWhat" $value) (join ", " $allowed) (kindIs "bool" $value | ternary ", in quotes" ""))) -}}
{{- end -}}
{{- end -}}
{{- range $path, $form := $bounds.texts -}}
{{- $value := (include "baton.at" (dict "values" $.Values "path" $path) | fromJson).value -}}
{{- include "baton.checkForm" (dict "root" $ "path" $path "value" $value "form" (get $bounds.forms $form)) -}}
{{- end -}}
{{- range $section := $bounds.resources -}}
{{- range $kind := list "requests" "limits" -}}
{{- range $name := list "cpu" "memory" -}}
{{- $path := printf "%s.resources.%s.%s" $section $kind $name -}}
{{- $value := (include "baton.at" (dict "values" $.Values "path" $path) | fromJson).value -}}
{{- if ne (include "baton.isWhat" $value) "is not set" -}}
{{- include "baton.checkForm" (dict "root" $ "path" $path "value" $value "form" (get $bounds.forms $name)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if gt (len .Values.workers.topologyLabels) 3 -}}
{{- include "baton.fail" (list $ (printf "workers.topologyLabels has %d labels; give at most 3, the outermost first" (len .Values.workers.topologyLabels))) -}}
{{- end -}}
{{- range .Values.workers.topologyLabels -}}
{{- include "baton.checkForm" (dict "root" $ "path" "workers.topologyLabels" "value" . "form" $bounds.forms.topology) -}}
{{- end -}}
{{- range $key, $_ := .Values.models -}}
{{- include "baton.checkForm" (dict "root" $ "path" "a name in models" "value" $key "form" $bounds.forms.model) -}}
{{- end -}}
{{- end -}}
