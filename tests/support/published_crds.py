"""Schemas of the objects that the chart makes for cert-manager and the Gateway API, closed: a field
that is not listed is refused.

They hold the fields that the chart uses, with types, enumerations, patterns and required fields of
the published definitions: cert-manager.io_{certificates,issuers}.yaml of cert-manager (v1, after
v1.21.0-beta.0) and gateway.networking.k8s.io_httproutes.yaml of the Gateway API (v1, standard
channel, 2026-08). The definitions themselves have 12,000 lines.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
DURATION: Schema = {"type": "string", "pattern": r"^([0-9]+(\.[0-9]+)?(ns|us|ms|s|m|h))+$"}  # of Go
LABEL = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
HOST = r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
USAGES = (
    "signing", "digital signature", "content commitment", "key encipherment", "key agreement",
    "data encipherment", "cert sign", "crl sign", "encipher only", "decipher only", "any",
    "server auth", "client auth", "code signing", "email protection", "s/mime",
    "ipsec end system", "ipsec tunnel", "ipsec user", "timestamping", "ocsp signing",
    "microsoft sgc", "netscape sgc",
)  # fmt: skip


def closed(properties: dict[str, Schema], *required: str) -> Schema:
    """Return the schema of an object with these fields alone."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def listed(items: Schema, most: int | None = None) -> Schema:
    return {"type": "array", "items": items} | ({} if most is None else {"maxItems": most})


def text(most: int, pattern: str = "") -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": most} | (
        {"pattern": pattern} if pattern else {}
    )


def whole(api: str, kind: str, spec: Schema) -> Schema:
    """Return the schema of an object with metadata as the chart writes them."""
    metadata = closed(
        {"name": text(253), "namespace": text(63, LABEL), "labels": {"type": "object"}},
        "name", "namespace",
    )  # fmt: skip
    fields = {"apiVersion": {"const": api}, "kind": {"const": kind}, "metadata": metadata}
    return closed({**fields, "spec": spec}, "apiVersion", "kind", "metadata", "spec")


CERTIFICATE = closed(
    {
        "isCA": {"type": "boolean"},
        "commonName": TEXT,
        "secretName": TEXT,
        "duration": DURATION,
        "renewBefore": DURATION,
        "privateKey": closed({
            "algorithm": {"enum": ["RSA", "ECDSA", "Ed25519"]},
            "size": {"type": "integer"},
            "encoding": {"enum": ["PKCS1", "PKCS8"]},
            "rotationPolicy": {"enum": ["Never", "Always"]},
        }),
        "usages": listed({"enum": list(USAGES)}),
        "dnsNames": listed(TEXT),
        "issuerRef": closed({"name": TEXT, "kind": TEXT, "group": TEXT}, "name"),
    },
    "issuerRef", "secretName",
)  # fmt: skip
ISSUER = closed({"selfSigned": closed({}), "ca": closed({"secretName": TEXT}, "secretName")})
PATH = closed({
    "type": {"enum": ["Exact", "PathPrefix", "RegularExpression"]},
    "value": {"type": "string", "maxLength": 1024},
})  # fmt: skip
BACKEND = closed(
    {"name": text(253), "port": {"type": "integer", "minimum": 1, "maximum": 65535}}, "name"
)
RULE = closed({
    "matches": listed(closed({"path": PATH}), 64),
    "timeouts": closed({"request": text(40, "^([0-9]{1,5}(h|m|s|ms)){1,4}$")}),
    "backendRefs": listed(BACKEND, 16),
})  # fmt: skip
HTTP_ROUTE = closed({
    "parentRefs": listed(closed({"name": text(253), "namespace": text(63, LABEL)}, "name"), 32),
    "hostnames": listed(text(253, HOST), 16),
    "rules": listed(RULE, 16),
})  # fmt: skip

PUBLISHED: dict[str, Schema] = {
    "Certificate": whole("cert-manager.io/v1", "Certificate", CERTIFICATE),
    "Issuer": whole("cert-manager.io/v1", "Issuer", ISSUER),
    "HTTPRoute": whole("gateway.networking.k8s.io/v1", "HTTPRoute", HTTP_ROUTE),
}
