"""Runs a rendered release on this machine: pods are namespaces, containers are processes.

    cluster.py     objects: what is wanted; StatefulSets, Deployments, Jobs and hooks make pods
    pod.py         one pod: init containers, probes at their periods, restarts, preStop, grace
    container.py   one container: its own root, mounts, processes and network; no rights
    network.py     addresses, Services by readiness, NetworkPolicies as nftables rules
    dns.py         names of Services
    secrets_server.py  the Kubernetes API, as far as Secrets
    programs.py    kubectl and helm for what the documents tell a user to type

Needs root, iproute2 and nftables. It has no scheduler, no limits of CPU and memory and no seccomp.
"""
