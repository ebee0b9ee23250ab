{{/* Whether a role's workers can be what the values say. */}}

{{/* A model is split over ranks by its heads, as engine/spec/rank_split.py does. */}}
{{- define "baton.checkSplit" -}}
{{- $tp := int .tp -}}
{{- $model := .root.Values.model -}}
{{- $kvHeads := int $model.kvHeads -}}
{{- $heads := int $model.heads -}}
{{- if and $model.embedded (not $kvHeads) -}}{{/* baton-tiny's */}}
{{- $kvHeads = 4 -}}
{{- $heads = 8 -}}
{{- end -}}
{{- if and $heads $kvHeads (ne (mod $heads $kvHeads) 0) -}}
{{- include "baton.fail" (list .root (printf "model.heads is %d, no multiple of model.kvHeads %d; take num_attention_heads and num_key_value_heads from the model's config.json" $heads $kvHeads)) -}}
{{- end -}}
{{- if and (gt $tp 1) (not $kvHeads) -}}
{{- include "baton.fail" (list .root (printf "%s.tp is %d, but model.kvHeads is 0, so that the chart cannot know whether the model can be split; set model.kvHeads to num_key_value_heads of the model's config.json" .role $tp)) -}}
{{- end -}}
{{- if and (gt $tp 1) (ne (mod $kvHeads $tp) 0) -}}
{{- if ne (mod $tp $kvHeads) 0 -}}
{{- include "baton.fail" (list .root (printf "%s.tp is %d, which does not divide model.kvHeads %d; set %s.tp to a divisor or a multiple of it" .role $tp $kvHeads .role)) -}}
{{- end -}}
{{- if not $heads -}}
{{- include "baton.fail" (list .root (printf "%s.tp is %d, above model.kvHeads %d, but model.heads is 0; set model.heads to num_attention_heads of the model's config.json" .role $tp $kvHeads)) -}}
{{- end -}}
{{- if ne (mod $heads $tp) 0 -}}
{{- include "baton.fail" (list .root (printf "%s.tp is %d, which does not divide model.heads %d; set %s.tp to a divisor of it" .role $tp $heads .role)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The names are those that NVIDIA's device plugin makes, with all its strategies for MIG. */}}
{{- define "baton.checkGpu" -}}
{{- $count := int .gpu.count -}}
{{- $name := .gpu.resource -}}
{{- $path := printf "%s.gpu.resource" .role -}}
{{- if and (gt $count 0) (not $name) -}}
{{- include "baton.fail" (list .root (printf "%s.gpu.count is %d without %s; name the device plugin's resource, such as nvidia.com/gpu" .role $count $path)) -}}
{{- end -}}
{{- if regexMatch "^(amd\\.com|gpu\\.intel\\.com|habana\\.ai|google\\.com|aws\\.amazon\\.com)/" $name -}}
{{- include "baton.fail" (list .root (printf "%s is %s, a device for which Baton has no kernels; name a resource of NVIDIA's device plugin, such as nvidia.com/gpu, or set %s.gpu.count=0" $path $name .role)) -}}
{{- end -}}
{{- if and $name (not (regexMatch "^[a-z0-9.-]+\\.[a-z]+/[A-Za-z0-9._-]+$" $name)) -}}
{{- include "baton.fail" (list .root (printf "%s is %s, which no device plugin offers; write it as DOMAIN/NAME, such as nvidia.com/gpu" $path $name)) -}}
{{- end -}}
{{- $known := "^nvidia\\.com/(gpu|mig-[0-9]+g\\.[0-9]+gb([.-](me|all|gfx))*)(\\.shared)?$" -}}
{{- if and $name (not .gpu.renamed) (not (regexMatch $known $name)) -}}
{{- include "baton.fail" (list .root (printf "%s is %s, which NVIDIA's device plugin does not offer by itself; name nvidia.com/gpu or a MIG device such as nvidia.com/mig-1g.10gb, with .shared where GPUs are shared under that name, or set %s.gpu.renamed=true if your plugin's configuration gives GPUs this name" $path $name .role)) -}}
{{- end -}}
{{- end -}}
