{{/* The Secrets that the values name: what each is for, the keys that pods read, and the command that
creates it. NOTES.txt looks them up (docs/decisions/0146-named-secrets.md). */}}

{{/* By a key whose content comes from a file, the word for that file. */}}
{{- define "baton.secretFiles" -}}
{{ dict "tls.crt" "CERTIFICATE_FILE" "tls.key" "KEY_FILE" "ca.crt" "AUTHORITY_FILE" | toJson }}
{{- end -}}

{{/* Those that one model names, as a JSON list. A command has words in capitals for what only its
user knows. */}}
{{- define "baton.namedSecrets" -}}
{{- $found := list -}}
{{- $files := include "baton.secretFiles" . | fromJson -}}
{{- range .Values.image.pullSecrets -}}
{{- $found = append $found (dict "name" . "value" "image.pullSecrets" "keys" (list) "command" "docker-registry" "content" (list "--docker-server=REGISTRY" "--docker-username=USER" "--docker-password=PASSWORD")) -}}
{{- end -}}
{{- with .Values.secrets.existing -}}
{{- $keys := list "token" "api-keys" -}}
{{- $content := list "--from-literal=token=\"$(openssl rand -hex 32)\"" "--from-literal=api-keys=API_KEYS" -}}
{{- if or $.Values.redis.url (include "baton.redisServers" $ | fromJsonArray) -}}
{{- $content = append $content "--from-literal=redis-password=PASSWORD" -}}
{{- end -}}
{{- if include "baton.redisServers" $ | fromJsonArray -}}{{- $keys = append $keys "redis-password" -}}{{- end -}}
{{- $found = append $found (dict "name" . "value" "secrets.existing" "keys" $keys "command" "generic" "content" $content) -}}
{{- end -}}
{{- range $component, $name := .Values.tls.existingSecrets -}}
{{- if $name -}}
{{- $keys := eq $component "ray" | ternary (list "tls.crt" "tls.key") (list "tls.crt" "tls.key" "ca.crt") -}}
{{- $content := list -}}
{{- range $keys -}}{{- $content = append $content (printf "--from-file=%s=%s" . (get $files .)) -}}{{- end -}}
{{- $found = append $found (dict "name" $name "value" (printf "tls.existingSecrets.%s" $component) "keys" $keys "command" "generic" "content" $content) -}}
{{- end -}}
{{- end -}}
{{- with .Values.model.tokenSecret -}}
{{- $found = append $found (dict "name" . "value" (printf "%smodel.tokenSecret" ($.modelKey | empty | ternary "" (printf "models.%v." $.modelKey))) "keys" (list "token") "command" "generic" "content" (list "--from-literal=token=TOKEN")) -}}
{{- end -}}
{{- if .Values.router.adminPort -}}
{{- $found = append $found (dict "name" .Values.router.adminKeySecret "value" (include "baton.valuePath" (list . "router" "adminKeySecret")) "keys" (list "admin-key") "command" "generic" "content" (list "--from-literal=admin-key=\"$(openssl rand -hex 32)\"")) -}}
{{- end -}}
{{- $pair := list (printf "--cert=%s" (get $files "tls.crt")) (printf "--key=%s" (get $files "tls.key")) -}}
{{- with .Values.router.tlsSecret -}}
{{- $found = append $found (dict "name" . "value" (include "baton.valuePath" (list $ "router" "tlsSecret")) "keys" (list "tls.crt" "tls.key") "command" "tls" "content" $pair) -}}
{{- end -}}
{{- if and .Values.ingress.enabled .Values.ingress.tlsSecret -}}
{{- $found = append $found (dict "name" .Values.ingress.tlsSecret "value" (printf "%s (no pod needs it)" (include "baton.valuePath" (list . "ingress" "tlsSecret"))) "keys" (list "tls.crt" "tls.key") "command" "tls" "content" $pair) -}}
{{- end -}}
{{ toJson $found }}
{{- end -}}

{{/* Where a model's value stands: among its own, or among the release's, which it has otherwise. */}}
{{- define "baton.valuePath" -}}
{{- $root := index . 0 -}}
{{- $path := printf "%s.%s" (index . 1) (index . 2) -}}
{{- $value := get (get $root.Values (index . 1)) (index . 2) -}}
{{- if and $root.modelKey (ne $value (get (get $root.release.Values (index . 1)) (index . 2))) -}}
models.{{ $root.modelKey }}.{{ $path }}
{{- else -}}{{ $path }}{{- end -}}
{{- end -}}

{{/* What the namespace lacks of the Secrets that all models name, as a JSON list of "purpose" and
"command", each Secret once. */}}
{{- define "baton.missingSecrets" -}}
{{- $files := include "baton.secretFiles" . | fromJson -}}
{{- $named := list -}}
{{- range printf "[%s]" (include "baton.eachModel" (dict "root" . "objects" "baton.namedSecrets" "separator" ",")) | fromJsonArray -}}
{{- $named = concat $named . -}}
{{- end -}}
{{- $missing := list -}}
{{- $seen := list -}}
{{- range $secret := $named -}}
{{- if not (has $secret.name $seen) -}}
{{- $seen = append $seen $secret.name -}}
{{- $values := list -}}
{{- $keys := list -}}
{{- $content := list -}}
{{- $command := $secret.command -}}
{{- range $named -}}
{{- if eq .name $secret.name -}}
{{- $values = append $values .value | uniq -}}
{{- $keys = concat $keys .keys | uniq -}}
{{- if eq .command "generic" -}}{{- $command = .command -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- range $named -}}
{{- if and (eq .name $secret.name) (eq .command $command) -}}{{/* the other kinds take no files of any name */}}
{{- $content = concat $content .content | uniq -}}
{{- end -}}
{{- end -}}
{{- $kubectl := printf "kubectl -n %s" $.Release.Namespace -}}
{{- $purpose := join ", " $values -}}
{{- $live := lookup "v1" "Secret" $.Release.Namespace $secret.name -}}
{{- if not $live -}}
{{- $missing = append $missing (dict "purpose" $purpose "command" (printf "%s create secret %s %s %s" $kubectl $command $secret.name (join " " $content))) -}}
{{- else -}}
{{- range $key := $keys -}}
{{- if not (hasKey ($live.data | default dict) $key) -}}
{{- $patch := printf `'{"stringData": {"%s": "VALUE"}}'` $key -}}
{{- with get $files $key -}}{{/* JSON has no line breaks in a text, and PEM has some */}}
{{- $patch = printf `"{\"data\": {\"%s\": \"$(base64 < %s | tr -d '\n')\"}}"` $key . -}}
{{- end -}}
{{- $missing = append $missing (dict "purpose" (printf "%s: the Secret is there, its key %s is not" $purpose $key) "command" (printf "%s patch secret %s -p %s" $kubectl $secret.name $patch)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{ toJson $missing }}
{{- end -}}
