{{/* Values that do not fit together. Each message names the value and the remedy. */}}

{{/* A quantity such as 500m, 2 or 64Gi as a number. */}}
{{- define "baton.quantity" -}}
{{- $units := dict "" 1.0 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 -}}
{{- $number := regexFind "^[0-9.]+" (toString .) -}}
{{- mulf (float64 $number) (get $units (trimPrefix $number (toString .)) | default 1.0) -}}
{{- end -}}

{{/* Fails, and names the model for whose values it does. */}}
{{- define "baton.fail" -}}
{{- $key := (index . 0).modelKey -}}
{{- fail (printf "%s%s" ($key | empty | ternary "" (printf "models.%v: " $key)) (index . 1)) -}}
{{- end -}}

{{- define "baton.validate" -}}
{{- include "baton.checkBounds" . -}}
{{- $hosts := dict -}}
{{- $routes := dict -}}
{{- if .Values.httpRoute.enabled -}}
{{- $_ := set $routes (printf "%s/%s" .Values.httpRoute.parent.name .Values.httpRoute.hostname) "" -}}
{{- end -}}
{{- range $key, $own := .Values.models -}}
{{- $hostname := dig "httpRoute" "hostname" "" $own -}}
{{- if dig "httpRoute" "enabled" false $own -}}
{{- $route := printf "%s/%s" (dig "httpRoute" "parent" "name" $.Values.httpRoute.parent.name $own) $hostname -}}
{{- if hasKey $routes $route -}}
{{- include "baton.fail" (list $ (printf "models.%s.httpRoute.hostname is %s, which another model of the release has at the same Gateway; give each model a host name of its own" $key ($hostname | default "empty (all host names)"))) -}}
{{- end -}}
{{- $_ := set $routes $route $key -}}
{{- end -}}
{{- $host := dig "ingress" "host" "" $own -}}
{{- if and $host (or (hasKey $hosts $host) (eq $host $.Values.ingress.host)) -}}
{{- include "baton.fail" (list $ (printf "models.%s.ingress.host is %s, which another model of the release has; give each model a host of its own" $key $host)) -}}
{{- end -}}
{{- $_ := set $hosts (default "-" $host) $key -}}
{{- end -}}
{{- $model := .Values.model -}}
{{- $sources := 0 -}}
{{- range list $model.path $model.repository -}}{{- if . -}}{{- $sources = add1 $sources -}}{{- end -}}{{- end -}}
{{- if $model.embedded -}}{{- $sources = add1 $sources -}}{{- end -}}
{{- if ne (int $sources) 1 -}}
{{- include "baton.fail" (list $ (printf "model: %d of model.embedded, model.path and model.repository are set; set exactly one" (int $sources))) -}}
{{- end -}}
{{- if and $model.volume.existingClaim $model.volume.hostPath -}}
{{- include "baton.fail" (list $ "model.volume: existingClaim and hostPath are both set; keep one") -}}
{{- end -}}
{{- if and $model.path (not $model.volume.existingClaim) (not $model.volume.hostPath) -}}
{{- include "baton.fail" (list $ "model.path names a folder of a volume, but neither model.volume.existingClaim nor model.volume.hostPath is set; set one, or let model.repository download the model") -}}
{{- end -}}
{{- if and $model.repository $model.volume.hostPath -}}
{{- include "baton.fail" (list $ "model.repository is downloaded into a claim; unset model.volume.hostPath, or set model.path to a folder that is there") -}}
{{- end -}}
{{- if and $model.tokenSecret (not $model.repository) -}}
{{- include "baton.fail" (list $ (printf "model.tokenSecret is %s, but nothing is downloaded; unset it, or set model.repository" $model.tokenSecret)) -}}
{{- end -}}
{{- if and .Values.router.adminPort (not .Values.router.adminKeySecret) -}}
{{- include "baton.fail" (list $ "router.adminPort is set and router.adminKeySecret is empty; name a Secret with the operator's key under admin-key") -}}
{{- end -}}
{{- if and (not .Values.redis.enabled) (not .Values.redis.url) -}}
{{- include "baton.fail" (list $ "redis.enabled is false and redis.url is empty: workers would not find each other; set redis.url to redis://HOST:PORT/N") -}}
{{- end -}}
{{- if and .Values.redis.enabled .Values.redis.url -}}
{{- include "baton.fail" (list $ "redis.enabled and redis.url are both set; set redis.enabled=false to use your own Redis") -}}
{{- end -}}
{{- if and .Values.redis.url (not .Values.secrets.existing) -}}
{{- include "baton.fail" (list $ "redis.url is set and secrets.existing is empty: the Secret that the hook creates has no password of your Redis; set secrets.existing to a Secret with token, api-keys and, if your Redis has a password, redis-password") -}}
{{- end -}}
{{- $plain := hasPrefix "redis://" .Values.redis.url -}}
{{- if and $plain (not .Values.redis.plainText) (ne .Values.tls.mode "off") -}}
{{- include "baton.fail" (list $ (printf "redis.url begins with redis://, which is plain text, but tls.mode is %s; write rediss://, or set redis.plainText=true for a Redis without TLS" .Values.tls.mode)) -}}
{{- end -}}
{{- if and .Values.redis.plainText (not $plain) -}}
{{- include "baton.fail" (list $ "redis.plainText is set, but redis.url does not begin with redis://; unset it (tls.mode=off is plain text for the release's own Redis too)") -}}
{{- end -}}
{{- range $section, $resources := dict "router" .Values.router.resources "prefill" .Values.prefill.resources "decode" .Values.decode.resources "kuberay.head" .Values.kuberay.head.resources "autoscaling.baton" .Values.autoscaling.baton.resources -}}
{{- if not $resources.requests -}}
{{- include "baton.fail" (list $ (printf "%s.resources.requests is empty; give cpu and memory, such as cpu: 1 and memory: 1Gi" $section)) -}}
{{- end -}}
{{- if not (dig "limits" "memory" "" $resources) -}}
{{- include "baton.fail" (list $ (printf "%s.resources.limits.memory is not set; set it, so that one pod cannot take a node's memory" $section)) -}}
{{- end -}}
{{- range $kind := list "cpu" "memory" -}}
{{- $least := get $resources.requests $kind -}}
{{- $most := get $resources.limits $kind -}}
{{- if and $least $most (gt (include "baton.quantity" $least | float64) (include "baton.quantity" $most | float64)) -}}
{{- include "baton.fail" (list $ (printf "%s.resources.requests.%s is %v, above the limit of %v; lower it, or raise %s.resources.limits.%s" $section $kind $least $most $section $kind)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $role := list "prefill" "decode" -}}
{{- $pool := get $.Values $role -}}
{{- $tp := int $pool.tp -}}
{{- if and (gt (int $pool.gpu.count) 0) (gt $tp (int $pool.gpu.count)) -}}
{{- include "baton.fail" (list $ (printf "%s.tp is %d, but %s.gpu.count is %d, and each rank needs a GPU of its own; set %s.gpu.count=%d, or lower %s.tp" $role $tp $role (int $pool.gpu.count) $role $tp $role)) -}}
{{- end -}}
{{- if ne (mod $tp (int $pool.ep)) 0 -}}
{{- include "baton.fail" (list $ (printf "%s.ep is %d, but the %d ranks of %s.tp cannot form %d equal groups; set %s.ep to a divisor of %s.tp" $role (int $pool.ep) $tp $role (int $pool.ep) $role $role)) -}}
{{- end -}}
{{- include "baton.checkSplit" (dict "root" $ "role" $role "tp" $tp) -}}
{{- include "baton.checkGpu" (dict "root" $ "role" $role "gpu" $pool.gpu) -}}
{{- $device := get $pool.settings "worker.device" | default (get $.Values.workers.settings "worker.device") -}}
{{- if and (gt (int $pool.gpu.count) 0) (eq (toString $device) "cpu") -}}
{{- include "baton.fail" (list $ (printf "%s.gpu.count is %d, but worker.device is cpu; set %s.gpu.count=0, or remove worker.device" $role (int $pool.gpu.count) $role)) -}}
{{- end -}}
{{- if gt (include "baton.quantity" $.Values.workers.sharedMemory | float64) (include "baton.quantity" $pool.resources.limits.memory | float64) -}}
{{- include "baton.fail" (list $ (printf "workers.sharedMemory is %s, above the %v of %s.resources.limits.memory, of which it is a part; lower it, or raise the limit" $.Values.workers.sharedMemory $pool.resources.limits.memory $role)) -}}
{{- end -}}
{{- if and (gt (int $pool.rdma.count) 0) (not $pool.rdma.resource) -}}
{{- include "baton.fail" (list $ (printf "%s.rdma.count is %d without %s.rdma.resource; name the device plugin's resource, such as rdma/hca" $role (int $pool.rdma.count) $role)) -}}
{{- end -}}
{{- end -}}
{{- if eq .Values.tls.mode "existing" -}}
{{- $certified := include "baton.certified" . | fromJsonArray -}}
{{- range $component := $certified -}}
{{- if not (get $.Values.tls.existingSecrets $component) -}}
{{- include "baton.fail" (list $ (printf "tls.mode is existing, but tls.existingSecrets.%s is empty; name a Secret with %s" $component (eq $component "ray" | ternary "tls.crt and tls.key of an authority for Ray alone" "tls.crt, tls.key and ca.crt"))) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.tls.existingSecrets.redis (not (has "redis" $certified)) -}}
{{- include "baton.fail" (list $ "tls.existingSecrets.redis is set, but the release runs no Redis; unset it, or set redis.enabled=true") -}}
{{- end -}}
{{- if and .Values.tls.existingSecrets.ray (not (has "ray" $certified)) -}}
{{- include "baton.fail" (list $ "tls.existingSecrets.ray is set, but orchestrator is plain, which has no Ray; unset it, or set orchestrator=kuberay") -}}
{{- end -}}
{{- else -}}
{{- range $component, $name := .Values.tls.existingSecrets -}}
{{- if $name -}}
{{- include "baton.fail" (list $ (printf "tls.existingSecrets.%s is set, but tls.mode is %s; set tls.mode=existing" $component $.Values.tls.mode)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.tls.issuer.name (ne .Values.tls.mode "certManager") -}}
{{- include "baton.fail" (list $ (printf "tls.issuer.name is set, but tls.mode is %s; set tls.mode=certManager" .Values.tls.mode)) -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.host) -}}
{{- include "baton.fail" (list $ "ingress.enabled without ingress.host; set the host name of the API") -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parent.name) -}}
{{- include "baton.fail" (list $ "httpRoute.enabled without httpRoute.parent.name; name the Gateway") -}}
{{- end -}}
{{- if not .Values.networkPolicy.apiPorts -}}
{{- include "baton.fail" (list $ "networkPolicy.apiPorts is empty, which would open every port to the controller; give those of the API server, such as 443") -}}
{{- end -}}
{{- range .Values.networkPolicy.apiPorts -}}
{{- if or (lt (int .) 1) (gt (int .) 65535) -}}
{{- include "baton.fail" (list $ (printf "networkPolicy.apiPorts has %v; give numbers from 1 to 65535" .)) -}}
{{- end -}}
{{- end -}}
{{- $scaling := .Values.autoscaling -}}
{{- range $role := list "prefill" "decode" -}}
{{- $partition := get (get $.Values $role) "partition" | int -}}
{{- if and $partition (eq $.Values.orchestrator "kuberay") -}}
{{- $turns := ternary "pods" "the roles in turn" (eq $scaling.mode "baton") -}}
{{- include "baton.fail" (list $ (printf "%s.partition is %d, but orchestrator is kuberay, where an upgrade replaces no pod; set it to 0: `baton release replace` takes %s" $role $partition $turns)) -}}
{{- else if and $partition (eq $scaling.mode "baton") -}}
{{- include "baton.fail" (list $ (printf "%s.partition is %d, but autoscaling.mode is baton, where both roles are one StatefulSet; set it to 0" $role $partition)) -}}
{{- end -}}
{{- end -}}
{{- if eq $scaling.mode "baton" -}}
{{- if not (or $scaling.baton.ttftSeconds $scaling.baton.itlSeconds) -}}
{{- include "baton.fail" (list $ "autoscaling.mode is baton, but autoscaling.baton.ttftSeconds and itlSeconds are 0: the controller needs an objective; set one, such as autoscaling.baton.ttftSeconds=2") -}}
{{- end -}}
{{- range $key := list "tp" "ep" "gpu" "rdma" "resources" "nodeSelector" "tolerations" -}}
{{- if ne (get $.Values.prefill $key | toJson) (get $.Values.decode $key | toJson) -}}
{{- include "baton.fail" (list $ (printf "autoscaling.mode is baton, whose workers change roles, but prefill.%s and decode.%s differ; give both the same" $key $key)) -}}
{{- end -}}
{{- end -}}
{{- range $key, $value := .Values.prefill.settings -}}
{{- if and (hasKey $.Values.decode.settings $key) (ne (toString $value) (get $.Values.decode.settings $key | toString)) -}}
{{- include "baton.fail" (list $ (printf "autoscaling.mode is baton, whose workers change roles, but prefill.settings and decode.settings give %s the values %v and %v; give it once, in workers.settings" $key $value (get $.Values.decode.settings $key))) -}}
{{- end -}}
{{- end -}}
{{- $least := add .Values.prefill.replicas .Values.decode.replicas | int -}}
{{- $most := int $scaling.baton.maxWorkers -}}
{{- if and $most (lt $most $least) -}}
{{- include "baton.fail" (list $ (printf "autoscaling.baton.maxWorkers is %d, below the %d of prefill.replicas and decode.replicas together, which are the minimum; raise it, or set it to 0" $most $least)) -}}
{{- end -}}
{{- else if $scaling.baton.maxWorkers -}}
{{- include "baton.fail" (list $ (printf "autoscaling.baton.maxWorkers is set, but autoscaling.mode is %s; set autoscaling.mode=baton, or unset it" $scaling.mode)) -}}
{{- else if or $scaling.baton.ttftSeconds $scaling.baton.itlSeconds -}}
{{- include "baton.fail" (list $ (printf "autoscaling.baton has an objective, but autoscaling.mode is %s; set autoscaling.mode=baton, or unset it" $scaling.mode)) -}}
{{- end -}}
{{- $apis := .Capabilities.APIVersions -}}
{{- /* Every API server serves apiregistration, and Helm without one knows no such API: `helm template` passes. */}}
{{- if and (eq .Values.orchestrator "kuberay") ($apis.Has "apiregistration.k8s.io/v1") (not ($apis.Has "ray.io/v1")) -}}
{{- include "baton.fail" (list $ "orchestrator is kuberay (the default), but this cluster has no RayCluster (ray.io/v1); install the KubeRay operator, 1.6 or newer, or run the workers without Ray: --set orchestrator=plain") -}}
{{- end -}}
{{- if and (eq .Values.orchestrator "kuberay") (has $scaling.mode (list "hpa" "keda")) -}}
{{- include "baton.fail" (list $ (printf "autoscaling.mode is %s, but orchestrator is kuberay, and it cannot change a group of a RayCluster, which has no scale; set autoscaling.mode=none or baton, or orchestrator=plain" $scaling.mode)) -}}
{{- end -}}
{{- if and (eq .Values.orchestrator "kuberay") (gt (int $scaling.baton.maxWorkers) 2048) -}}
{{- include "baton.fail" (list $ (printf "autoscaling.baton.maxWorkers is %d, but orchestrator is kuberay, and `baton fleet` keeps at most 2048; lower it" (int $scaling.baton.maxWorkers))) -}}
{{- end -}}
{{- if has $scaling.mode (list "hpa" "keda") -}}
{{- if not .Values.monitoring.enabled -}}
{{- include "baton.fail" (list $ (printf "autoscaling.mode is %s, which reads metrics from Prometheus, but monitoring.enabled is false; set monitoring.enabled=true" $scaling.mode)) -}}
{{- end -}}
{{- range $role := list "prefill" "decode" -}}
{{- $least := int (get $.Values $role).replicas -}}
{{- $most := int (get $scaling $role).maxReplicas -}}
{{- if lt $most $least -}}
{{- include "baton.fail" (list $ (printf "autoscaling.%s.maxReplicas is %d, below the %d of %s.replicas, which is the least; raise it, or lower %s.replicas" $role $most $least $role $role)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.monitoring.enabled .Values.networkPolicy.enabled (not .Values.networkPolicy.monitoring) -}}
{{- $reader := has $scaling.mode (list "hpa" "keda") | ternary (printf ", whose metrics autoscaling.mode %s needs" $scaling.mode) "" -}}
{{- include "baton.fail" (list $ (printf "monitoring.enabled is true, but networkPolicy.monitoring is empty: no peer may scrape the workers%s; name the peers there, such as {namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}} for the namespace of Prometheus, or set networkPolicy.enabled=false" $reader)) -}}
{{- end -}}
{{- if and (eq $scaling.mode "keda") (not $scaling.keda.prometheus) -}}
{{- include "baton.fail" (list $ "autoscaling.mode is keda, but autoscaling.keda.prometheus is empty; give the URL of Prometheus, such as http://prometheus.monitoring:9090") -}}
{{- end -}}
{{- if ne $scaling.mode "keda" -}}
{{- range $name := list "prometheus" "authentication" "authModes" -}}
{{- if get $scaling.keda $name -}}
{{- include "baton.fail" (list $ (printf "autoscaling.keda.%s is set, but autoscaling.mode is %s; set autoscaling.mode=keda, or unset it" $name $scaling.mode)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if ne (empty $scaling.keda.authentication) (empty $scaling.keda.authModes) -}}
{{- include "baton.fail" (list $ "autoscaling.keda: authentication and authModes belong together; name the TriggerAuthentication and what it holds, such as bearer") -}}
{{- end -}}
{{- $ports := list .Values.workers.port .Values.workers.adminPort -}}
{{- if eq (int .Values.workers.port) (int .Values.workers.adminPort) -}}
{{- include "baton.fail" (list $ (printf "workers.port and workers.adminPort are both %d; give them different ports" (int .Values.workers.port))) -}}
{{- end -}}
{{- if has (int .Values.router.adminPort) (list (int .Values.router.port) (int .Values.router.grpcPort)) -}}
{{- include "baton.fail" (list $ (printf "router.adminPort is %d, a port for clients; give them different ports" (int .Values.router.adminPort))) -}}
{{- end -}}
{{- if eq (int .Values.router.port) (int .Values.router.grpcPort) -}}
{{- include "baton.fail" (list $ (printf "router.port and router.grpcPort are both %d; give them different ports" (int .Values.router.port))) -}}
{{- end -}}
{{- $range := splitList "-" .Values.workers.kvPorts -}}
{{- $first := int (index $range 0) -}}
{{- $last := int (index $range 1) -}}
{{- if or (ge $first $last) (gt $last 65535) -}}
{{- include "baton.fail" (list $ (printf "workers.kvPorts is %s; give it as FIRST-LAST with FIRST below LAST and LAST at most 65535" .Values.workers.kvPorts)) -}}
{{- end -}}
{{- if eq .Values.orchestrator "kuberay" -}}
{{- $fleet := include "baton.fleetPort" . | int -}}
{{- if and .modelKey (eq $fleet (int .Values.workers.port)) -}}
{{- include "baton.fail" (list $ (printf "workers.port is %d, at which the release's workers.adminPort puts the driver of this model beside Ray's head; choose another workers.port or workers.adminPort" $fleet)) -}}
{{- end -}}
{{- range $port := list 6379 6380 6381 6382 6383 6384 6385 10002 10999 -}}
{{- if eq $port $fleet -}}
{{- include "baton.fail" (list $ (printf "orchestrator is kuberay, and %d is a port of Ray, at which workers.adminPort puts a model's driver beside Ray's head; choose another workers.adminPort" $port)) -}}
{{- end -}}
{{- if or (has $port (list (int $.Values.workers.port) (int $.Values.workers.adminPort))) (and (ge $port $first) (le $port $last)) -}}
{{- include "baton.fail" (list $ (printf "orchestrator is kuberay, and %d is a port of Ray; choose other workers.port, workers.adminPort or workers.kvPorts" $port)) -}}
{{- end -}}
{{- end -}}
{{- range $port := list (int .Values.workers.port) (int .Values.workers.adminPort) $fleet -}}
{{- if and (gt $port 10002) (lt $port 10999) -}}
{{- include "baton.fail" (list $ (printf "orchestrator is kuberay, and %d is one of the ports 10002 to 10999 of Ray; choose other workers.port or workers.adminPort" $port)) -}}
{{- end -}}
{{- end -}}
{{- if and (gt $first 10002) (lt $last 10999) -}}
{{- include "baton.fail" (list $ (printf "orchestrator is kuberay, and workers.kvPorts is %s, within the ports 10002 to 10999 of Ray; choose another range" .Values.workers.kvPorts)) -}}
{{- end -}}
{{- end -}}
{{- range $port := $ports -}}
{{- if and (ge (int $port) $first) (le (int $port) $last) -}}
{{- include "baton.fail" (list $ (printf "workers.kvPorts %s contains the port %d of workers.port or workers.adminPort; choose another range" $.Values.workers.kvPorts (int $port))) -}}
{{- end -}}
{{- end -}}
{{- include "baton.checkSettings" . -}}
{{- end -}}
