{{/* What a RayCluster has for each model: a driver beside Ray's head, and a group for each role, or one
for both where a controller changes roles. */}}

{{/* The values that a pod may be made of, and more, without other models: `baton release replace`
replaces pods whose values have changed. */}}
{{- define "baton.rayValues" -}}
{{- omit .Values "router" "autoscaling" "ingress" "httpRoute" "networkPolicy" "tests" "topologySpread" "models" | toJson -}}
{{- end -}}

{{- define "baton.rayPorts" -}}
{{- dict "node-manager-port" "6380" "object-manager-port" "6381" "runtime-env-agent-port" "6382" "dashboard-agent-grpc-port" "6383" "dashboard-agent-listen-port" "6384" "metrics-export-port" "6385" "min-worker-port" "10002" "max-worker-port" "10999" "disable-usage-stats" "true" | toJson -}}
{{- end -}}

{{/* A driver's port: those of all models are in one pod. */}}
{{- define "baton.fleetPort" -}}
{{- add (.release | default .).Values.workers.adminPort (.modelNumber | default 0) -}}
{{- end -}}

{{- define "baton.fleetPortName" -}}
admin{{ with .modelNumber }}-{{ . }}{{ end }}
{{- end -}}

{{/* The pods that Ray joins: the head, and the workers of all models. */}}
{{- define "baton.rayNodes" -}}
{{- include "baton.pods" (dict "root" . "modelKey" "" "components" (list "ray-head" "prefill" "decode" "worker")) }}
{{- range $key, $_ := (.release | default .).Values.models }}
{{ include "baton.pods" (dict "root" $ "modelKey" $key "components" (list "prefill" "decode" "worker")) }}
{{- end }}
{{- end -}}

{{/* Ray calls a node by its address, and its TLS compares that with the certificate. So each pod has
a certificate of its own, by the authority `ray`, whose key the init container alone can read. */}}
{{- define "baton.rayCertificate" -}}
{{- if ne .root.Values.tls.mode "off" }}
- name: ray-certificate
  image: {{ .root.Values.image.worker }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [baton, authority, issue]
  args:
    - --folder=/etc/baton/ray-authority
    - --role=worker
    - --name=node
    - --host=$(POD_IP)
    - --host=127.0.0.1 # for commands in the pod, as KubeRay sets RAY_ADDRESS
    {{- with .service }}
    - --host={{ . }} # by which KubeRay lets workers call the head
    {{- end }}
    - --days=3650 # Ray reads it when a process starts, so it lasts as long as the pod
    - --out=/etc/baton/ray/tls
  env:
    - name: POD_IP
      valueFrom:
        fieldRef: {fieldPath: status.podIP}
  securityContext:
    {{- include "baton.containerSecurity" .root | nindent 4 }}
  resources:
    requests: {cpu: 10m, memory: 64Mi}
    limits: {memory: 256Mi}
  volumeMounts:
    - {name: ray-authority, mountPath: /etc/baton/ray-authority, readOnly: true}
    - {name: ray-tls, mountPath: /etc/baton/ray}
{{- end }}
{{- end -}}

{{- define "baton.rayTlsEnv" -}}
{{- if ne .Values.tls.mode "off" }}
- {name: RAY_USE_TLS, value: "1"}
- {name: RAY_TLS_CA_CERT, value: /etc/baton/ray/tls/authority.pem}
- {name: RAY_TLS_SERVER_CERT, value: /etc/baton/ray/tls/node.pem}
- {name: RAY_TLS_SERVER_KEY, value: /etc/baton/ray/tls/node.key}
{{- end }}
{{- end -}}

{{- define "baton.rayTlsMount" -}}
{{- if ne .Values.tls.mode "off" }}
- {name: ray-tls, mountPath: /etc/baton/ray, readOnly: true}
{{- end }}
{{- end -}}

{{- define "baton.rayTlsVolumes" -}}
{{- if ne .Values.tls.mode "off" }}
- name: ray-authority
  secret:
    secretName: {{ include "baton.certificate" (dict "root" . "component" "ray") }}
    defaultMode: 0440
    items:
      - {key: tls.crt, path: authority.pem}
      - {key: tls.key, path: authority.key}
- name: ray-tls
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
{{- end }}
{{- end -}}

{{- define "baton.rayFleet" -}}
# joins the head through its sockets in /tmp; a restart finds the workers by name
- name: fleet{{ with .modelKey }}-{{ . }}{{ end }}
  image: {{ .Values.image.worker }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [baton, fleet]
  args:
    - {{ include "baton.modelFolder" . | quote }}
    - --ray-address=$(POD_IP):6379
    - --prefill={{ .Values.prefill.replicas }}
    - --decode={{ .Values.decode.replicas }}
    - --cpus=0
    - --prefill-gpus={{ .Values.prefill.gpu.count }}
    - --decode-gpus={{ .Values.decode.gpu.count }}
    {{- if has "worker" (include "baton.workers" . | fromJsonArray) }}
    - --group={{ include "baton.rayGroup" (dict "root" . "component" "worker") }}
    {{- else }}
    - --by-role
    {{- with .modelKey }}
    - --group={{ . }}
    {{- end }}
    {{- end }}
    - --leave-workers
    {{- if include "baton.resizes" . }}
    - --follow # the number that the controller copies from the group
    {{- end }}
    - --admin-port={{ include "baton.fleetPort" . }}
    - --set=worker.drain_s={{ .Values.workers.drainSeconds }}
  env:
    - name: POD_IP
      valueFrom:
        fieldRef: {fieldPath: status.podIP}
    - {name: RAY_AUTH_MODE, value: token}
    - name: RAY_AUTH_TOKEN
      valueFrom:
        secretKeyRef: {name: {{ include "baton.release" . }}-ray, key: auth_token}
    {{- include "baton.rayTlsEnv" . | nindent 4 }}
    - {name: BATON_WORKER__HOST, value: 0.0.0.0} # of its metrics; workers have their own
    {{- include "baton.commonEnv" . | nindent 4 }}
  ports:
    - {name: {{ include "baton.fleetPortName" . }}, containerPort: {{ include "baton.fleetPort" . }}}
  startupProbe: # it has joined Ray, whose head may take two minutes
    httpGet: {path: /healthz, port: {{ include "baton.fleetPortName" . }}}
    periodSeconds: 2
    failureThreshold: 150
  livenessProbe:
    httpGet: {path: /healthz, port: {{ include "baton.fleetPortName" . }}}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  readinessProbe: # all workers are registered; `baton release replace` does not wait for that
    httpGet: {path: /readyz, port: {{ include "baton.fleetPortName" . }}}
    periodSeconds: 5
    timeoutSeconds: 2
  securityContext:
    {{- include "baton.containerSecurity" . | nindent 4 }}
  resources:
    requests: {cpu: 100m, memory: 256Mi}
    limits: {memory: 1Gi}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: shm, mountPath: /dev/shm}
    {{- include "baton.rayTlsMount" . | nindent 4 }}
    {{- if ne .Values.tls.mode "off" }}
    - {name: tls, mountPath: /etc/baton/tls, readOnly: true}
    {{- end }}
{{- end -}}

{{- define "baton.rayGroups" -}}
{{- $values := include "baton.rayValues" . | fromJson }}
{{- $ports := include "baton.rayPorts" . | fromJson }}
{{- range $component := include "baton.workers" . | fromJsonArray }}
{{- $scope := dict "root" $ "component" $component }}
{{- $group := include "baton.rayGroup" $scope }}
{{- $both := eq $component "worker" }}
{{- $pool := $both | ternary $.Values.decode (get $.Values $component) | deepCopy }}
{{- if $both }}
{{- $ofBoth := deepCopy $.Values.decode.settings }}
{{- include "baton.put" (dict "into" $ofBoth "own" $.Values.prefill.settings) }}
{{- $_ := set $pool "settings" $ofBoth }}
{{- $_ := set $pool "replicas" (add $.Values.prefill.replicas $.Values.decode.replicas) }}
{{- end }}
{{- $least := int $pool.replicas }}
{{- $replicas := $least }}
{{- $most := $least }}
{{- $strategy := dict }}
{{- if and $both (include "baton.resizes" $) }}
{{- $most = int $.Values.autoscaling.baton.maxWorkers }}
{{- /* An upgrade writes all groups: it must not set the number back, nor forget pods that leave. */}}
{{- $found := lookup "ray.io/v1" "RayCluster" $.Release.Namespace (printf "%s-ray" (include "baton.release" $)) }}
{{- range dig "spec" "workerGroupSpecs" (list) $found }}
{{- if eq .groupName $group }}
{{- $replicas = max $replicas (min $most (get . "replicas" | default 0 | int)) | int }}
{{- $strategy = get . "scaleStrategy" | default dict }}
{{- end }}
{{- end }}
{{- end }}
{{- $given := deepCopy $.Values.workers.settings }}
{{- include "baton.put" (dict "into" $given "own" $pool.settings) }}
{{- $settings := merge (dict "worker.host" "0.0.0.0" "worker.port" $.Values.workers.port "worker.admin_port" $.Values.workers.adminPort "worker.advertise" "$(POD_IP)" "worker.tp" $pool.tp "worker.ep" $pool.ep) $given }}
- groupName: {{ $group }}
  replicas: {{ $replicas }}
  minReplicas: {{ $least }}
  maxReplicas: {{ $most }}
  {{- with $strategy }}
  scaleStrategy:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  rayStartParams:
    {{- toYaml (merge (dict "num-gpus" (toString $pool.gpu.count) "resources" (printf "'{\"baton-%s\": 1}'" $group)) $ports) | nindent 4 }}
  template:
    metadata:
      labels:
        {{- include "baton.labels" $scope | nindent 8 }}
      annotations:
        baton/definition: {{ list $.Chart.Version $.Chart.AppVersion $.Values.topologySpread (omit $pool "replicas") (omit $values "prefill" "decode" "kuberay") | toJson | sha256sum }}
    spec:
      {{- include "baton.podCommon" $ | nindent 6 }}
      {{- include "baton.placement" $scope | nindent 6 }}
      # the preStop hook drains within this time
      terminationGracePeriodSeconds: {{ add $.Values.workers.drainSeconds 60 }}
      {{- include "baton.modelReady" (dict "root" $ "image" $.Values.image.worker "first" (include "baton.rayCertificate" (dict "root" $) | trim)) | nindent 6 }}
      containers:
        - name: worker
          image: {{ $.Values.image.worker }}
          imagePullPolicy: {{ $.Values.image.pullPolicy }}
          env:
            - name: POD_IP
              valueFrom:
                fieldRef: {fieldPath: status.podIP}
            {{- include "baton.rayTlsEnv" $ | nindent 12 }}
            {{- include "baton.commonEnv" $ | nindent 12 }}
            {{- range $setting, $value := $settings }}
            - name: BATON_{{ $setting | replace "." "__" | upper }}
              value: {{ include "baton.text" $value | quote }}
            {{- end }}
            - {name: RAY_gcs_rpc_server_reconnect_timeout_s, value: "600"} # for a head that is lost
            {{- if regexMatch "^[0-9]+$" (toString $pool.resources.requests.cpu) }}
            - name: OMP_NUM_THREADS # else Ray sets it to 1
              value: {{ $pool.resources.requests.cpu | toString | quote }}
            {{- end }}
            - name: UCX_TCP_PORT_RANGE
              value: {{ $.Values.workers.kvPorts | quote }}
            {{- with $.Values.workers.kvDevices }}
            - name: UCX_NET_DEVICES
              value: {{ . | quote }}
            {{- end }}
            {{- with include "baton.topologyEnv" $ }}
            {{- . | trim | nindent 12 }}
            {{- end }}
          ports:
            - {name: worker, containerPort: {{ $.Values.workers.port }}}
            - {name: admin, containerPort: {{ $.Values.workers.adminPort }}}
            - {name: raylet, containerPort: 6380}
          lifecycle:
            preStop:
              exec:
                command: [baton, release, leave, --within={{ add $.Values.workers.drainSeconds 45 }}]
          startupProbe:
            tcpSocket: {port: raylet}
            periodSeconds: 2
            failureThreshold: 150
          livenessProbe: # of Ray: the worker's supervisor watches the worker
            tcpSocket: {port: raylet}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 6
          readinessProbe:
            httpGet: {path: /readyz, port: admin}
            periodSeconds: 2
            timeoutSeconds: 2
            failureThreshold: 2
          securityContext:
            {{- include "baton.containerSecurity" $ | nindent 12 }}
            {{- if gt (int $pool.rdma.count) 0 }}
              add: [IPC_LOCK] # registered memory is locked
            {{- end }}
          resources:
            requests:
              {{- toYaml $pool.resources.requests | nindent 14 }}
            limits:
              {{- toYaml $pool.resources.limits | nindent 14 }}
              {{- if gt (int $pool.gpu.count) 0 }}
              {{ $pool.gpu.resource }}: {{ $pool.gpu.count }}
              {{- end }}
              {{- if gt (int $pool.rdma.count) 0 }}
              {{ $pool.rdma.resource }}: {{ $pool.rdma.count }}
              {{- end }}
          volumeMounts:
            {{- include "baton.mounts" $ | nindent 12 }}
            {{- include "baton.rayTlsMount" $ | nindent 12 }}
            - {name: shm, mountPath: /dev/shm}
      volumes:
        {{- include "baton.volumes" $scope | nindent 8 }}
        {{- include "baton.rayTlsVolumes" $ | nindent 8 }}
        - name: shm
          emptyDir: {medium: Memory, sizeLimit: {{ $.Values.workers.sharedMemory }}}
{{- end }}
{{- end -}}
