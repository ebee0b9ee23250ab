"""Runs a rendered release on this machine: pods are namespaces, containers are processes.

    cluster.py     objects: what is wanted; StatefulSets, Deployments, Jobs and hooks make pods
    workloads.py   the next actions of controllers
    kuberay.py     the pods of a RayCluster, as KubeRay's operator makes them
    pod.py         one pod: init containers, probes at their periods, restarts, preStop, grace
    container.py   one container: its own root, mounts, processes and network; no rights
    network.py     addresses, Services by readiness, NetworkPolicies as nftables rules
    dns.py         names of Services
    services.py    addresses of Services, and the ready pods behind them
    secrets_server.py  the Kubernetes API, as far as Secrets
    programs.py    kubectl (kubectl.py, pod_views.py) and helm for what documents tell to type
    user.py        a user with these programs, in a network of their own
    load.py        clients that call a Service, and compare each answer with the right one
    loaded_release.py  a release in pods, and such clients of it

Needs root, iproute2 and nftables. It has no scheduler, no limits of CPU and memory and no seccomp.
"""
