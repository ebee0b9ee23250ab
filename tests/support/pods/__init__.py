"""Runs a rendered release on this machine: pods are namespaces, containers are processes.

    cluster.py     objects: what is wanted; StatefulSets, Deployments, Jobs and hooks make pods
    workloads.py   the next actions of controllers
    kuberay.py     the pods of a RayCluster, as KubeRay's operator makes them
    pod.py         one pod: init containers, probes at their periods, restarts, preStop, grace
    container.py   one container: its own root, mounts, processes and network; no rights
    network.py     addresses, Services by readiness, NetworkPolicies as nftables rules
    dns.py         names of Services
    secrets_server.py  the Kubernetes API, as far as Secrets
    programs.py    kubectl and helm for what the documents tell a user to type
    load.py        clients that call a Service, and compare each answer with the right one

Needs root, iproute2 and nftables. It has no scheduler, no limits of CPU and memory and no seccomp.
"""
