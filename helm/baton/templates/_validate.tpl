{{/* What values.schema.json cannot say: values that do not fit together. Each message names the
value and the remedy. */}}

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
{{- range $place, $resources := dict "router" .Values.router.resources "prefill" .Values.prefill.resources "decode" .Values.decode.resources "kuberay.head" .Values.kuberay.head.resources "autoscaling.baton" .Values.autoscaling.baton.resources -}}
{{- if not $resources.requests -}}
{{- include "baton.fail" (list $ (printf "%s.resources.requests is empty; give cpu and memory, such as cpu: 1 and memory: 1Gi" $place)) -}}
{{- end -}}
{{- if not (dig "limits" "memory" "" $resources) -}}
{{- include "baton.fail" (list $ (printf "%s.resources.limits.memory is not set; set it, so that one pod cannot take a node's memory" $place)) -}}
{{- end -}}
{{- range $kind := list "cpu" "memory" -}}
{{- $least := get $resources.requests $kind -}}
{{- $most := get $resources.limits $kind -}}
{{- if and $least $most (gt (include "baton.quantity" $least | float64) (include "baton.quantity" $most | float64)) -}}
{{- include "baton.fail" (list $ (printf "%s.resources.requests.%s is %v, above the limit of %v; lower it, or raise %s.resources.limits.%s" $place $kind $least $most $place $kind)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $role := list "prefill" "decode" -}}
{{- $pool := get $.Values $role -}}
{{- $tp := int $pool.tp -}}
{{- $heads := int $model.kvHeads -}}
{{- if and (gt (int $pool.gpu.count) 0) (gt $tp (int $pool.gpu.count)) -}}
{{- include "baton.fail" (list $ (printf "%s.tp is %d, but %s.gpu.count is %d, and each rank needs a GPU of its own; set %s.gpu.count=%d, or lower %s.tp" $role $tp $role (int $pool.gpu.count) $role $tp $role)) -}}
{{- end -}}
{{- if ne (mod $tp (int $pool.ep)) 0 -}}
{{- include "baton.fail" (list $ (printf "%s.ep is %d, but the %d ranks of %s.tp cannot form %d equal groups; set %s.ep to a divisor of %s.tp" $role (int $pool.ep) $tp $role (int $pool.ep) $role $role)) -}}
{{- end -}}
{{- if and $heads (gt $tp 1) (ne (mod $heads $tp) 0) (ne (mod $tp $heads) 0) -}}
{{- include "baton.fail" (list $ (printf "%s.tp is %d, which does not divide model.kvHeads %d; set %s.tp to a divisor or a multiple of it" $role $tp $heads $role)) -}}
{{- end -}}
{{- if and (gt (int $pool.gpu.count) 0) (not $pool.gpu.resource) -}}
{{- include "baton.fail" (list $ (printf "%s.gpu.count is %d without %s.gpu.resource; name the device plugin's resource, such as nvidia.com/gpu" $role (int $pool.gpu.count) $role)) -}}
{{- end -}}
{{- if regexMatch "^(amd\\.com|gpu\\.intel\\.com|habana\\.ai|google\\.com|aws\\.amazon\\.com)/" $pool.gpu.resource -}}
{{- include "baton.fail" (list $ (printf "%s.gpu.resource is %s, a device for which Baton has no kernels; name a resource of NVIDIA's device plugin, such as nvidia.com/gpu, or set %s.gpu.count=0" $role $pool.gpu.resource $role)) -}}
{{- end -}}
{{- if and $pool.gpu.resource (not (regexMatch "^[a-z0-9.-]+\\.[a-z]+/[A-Za-z0-9._-]+$" $pool.gpu.resource)) -}}
{{- include "baton.fail" (list $ (printf "%s.gpu.resource is %s, which no device plugin offers; write it as DOMAIN/NAME, such as nvidia.com/gpu" $role $pool.gpu.resource)) -}}
{{- end -}}
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
{{- include "baton.fail" (list $ (printf "tls.mode is existing, but tls.existingSecrets.%s is empty; name a Secret with tls.crt, tls.key and ca.crt" $component)) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.tls.existingSecrets.redis (not (has "redis" $certified)) -}}
{{- include "baton.fail" (list $ "tls.existingSecrets.redis is set, but the release runs no Redis; unset it, or set redis.enabled=true") -}}
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
{{- $scaling := .Values.autoscaling -}}
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
{{- include "baton.fail" (list $ "orchestrator is kuberay, but this cluster has no RayCluster (ray.io/v1); install the KubeRay operator, 1.6 or newer, or set orchestrator=plain") -}}
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
{{- range $place, $settings := dict "router.settings" .Values.router.settings "workers.settings" .Values.workers.settings "prefill.settings" .Values.prefill.settings "decode.settings" .Values.decode.settings -}}
{{- range $name, $_ := $settings -}}
{{- if hasKey $owned $name -}}
{{- $instead := get $owned $name -}}
{{- include "baton.fail" (list $ (printf "%s has %s, which the chart sets itself; remove it%s" $place $name ($instead | empty | ternary "" (printf ", and use %s" $instead)))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
