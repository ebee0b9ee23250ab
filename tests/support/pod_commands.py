"""Documented commands that are typed in pods: by the file of tests/helm whose last tests assert
that each of its commands was typed."""

from __future__ import annotations

IN_PODS: dict[str, tuple[str, ...]] = {
    "test_operator_commands.py": (
        "baton explain FILE --url http://127.0.0.1:8000",
        "curl http://127.0.0.1:8000/readyz",
        "curl http://127.0.0.1:9001/readyz",
        "helm rollback RELEASE",
        "helm upgrade",
        "kubectl describe pod POD",
        "kubectl describe pod RELEASE-baton-redis-0",
        "kubectl exec POD -- baton advise --router http://127.0.0.1:9402 --set slo.ttft_s=2",
        "kubectl exec POD -- baton drain POD",
        "kubectl get events",
        "kubectl get jobs",
        "kubectl get pods",
        "kubectl get pods -l app.kubernetes.io/instance=RELEASE -o wide",
        "kubectl get statefulset",
        "kubectl logs -l app.kubernetes.io/component=router --prefix --tail=200",
        "kubectl logs POD",
        "kubectl logs POD --previous",
        "kubectl logs job/RELEASE-baton-model-HASH",
        "kubectl port-forward POD 8000",
        "kubectl port-forward POD 9001",
        "kubectl port-forward POD 9402",
        "kubectl rollout restart",
        "kubectl rollout status",
        "kubectl rollout status statefulset/RELEASE-baton-decode",
    ),
}
