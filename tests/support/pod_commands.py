"""Documented commands that are typed in pods: by the file of tests/helm whose last tests assert
that each of its commands was typed."""

from __future__ import annotations


def patched(keys: str) -> str:
    """Return the command that writes keys of a release's Secret."""
    return f"kubectl patch secret RELEASE-baton-secrets -p '{{\"stringData\": {{{keys}}}}}'"


TOKEN_STEPS = (  # docs/kubernetes.md, "Another token"
    patched('"token": "OLD", "token-also": "NEW", "identity-secret": "OLD"'),
    patched('"token": "NEW", "token-also": "OLD"'),
    patched('"token": "NEW", "token-also": ""'),
)
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
    "test_rotation_under_load.py": (
        *TOKEN_STEPS,
        "kubectl rollout restart",
        "kubectl rollout status",
    ),
}
