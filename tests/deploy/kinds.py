"""What of the operators' kinds the manifests use, with the values that are possible: closed, so a misspelt field is noticed.

Written by hand from the operators' documentation and their definitions, which are not kept here. `make kubernetes CRDS=DIR`
compares with those themselves.
"""

from __future__ import annotations

from typing import Any

TEXT, COUNT, FLAG = str, int, bool
NAME = {"name": TEXT}
QUANTITY = TEXT
RESOURCES = {"requests": {"cpu": QUANTITY, "memory": QUANTITY}, "limits": {"memory": QUANTITY}}
LABELS = dict
SELECTOR = {"matchLabels": LABELS, "matchExpressions": [{"key": TEXT, "operator": {"In"}, "values": [TEXT]}]}

ENV = [{"name": TEXT, "value": TEXT, "valueFrom": {"fieldRef": {"fieldPath": TEXT}}}]
POD_CONTEXT = {
    "runAsNonRoot": FLAG, "runAsUser": COUNT, "runAsGroup": COUNT, "fsGroup": COUNT, "seccompProfile": {"type": {"RuntimeDefault"}},
}  # fmt: skip
CONTEXT = {"allowPrivilegeEscalation": FLAG, "readOnlyRootFilesystem": FLAG, "capabilities": {"drop": [{"ALL"}]}}
PROBE = {"periodSeconds": COUNT, "timeoutSeconds": COUNT, "failureThreshold": COUNT}
SECRET_FILES = {"secretName": TEXT, "items": [{"key": TEXT, "path": TEXT}]}
VOLUMES = {
    "volume": [{"name": TEXT, "emptyDir": {"sizeLimit": QUANTITY}, "secret": SECRET_FILES}],
    "mountPath": [{"name": TEXT, "mountPath": TEXT, "readOnly": FLAG}],
}
# What both kinds of the redis-operator have.
REDIS = {
    "clusterSize": COUNT,
    "kubernetesConfig": {
        "image": TEXT,
        "redisSecret": {"name": TEXT, "key": TEXT},
        "minReadySeconds": COUNT,
        "resources": RESOURCES,
    },
    "TLS": {"ca": TEXT, "cert": TEXT, "key": TEXT, "secret": SECRET_FILES},
    "serviceAccountName": TEXT,
    "terminationGracePeriodSeconds": COUNT,
    "podSecurityContext": POD_CONTEXT,
    "securityContext": CONTEXT,
    "affinity": {
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": COUNT, "podAffinityTerm": {"topologyKey": TEXT, "labelSelector": SELECTOR}}
            ]
        }
    },
    "readinessProbe": PROBE,
    "livenessProbe": PROBE,
    "initContainer": {
        "enabled": FLAG,
        "image": TEXT,
        "command": [TEXT],
        "args": [TEXT],
        "env": ENV,
        "securityContext": CONTEXT,
        "resources": RESOURCES,
    },
}

SHAPES: dict[tuple[str, str], dict[str, Any]] = {
    ("cert-manager.io/v1", "Issuer"): {"selfSigned": {}, "ca": {"secretName": TEXT}},
    ("cert-manager.io/v1", "Certificate"): {
        "secretName": TEXT,
        "secretTemplate": {"labels": LABELS},
        "isCA": FLAG,
        "commonName": TEXT,
        "duration": TEXT,
        "renewBefore": TEXT,
        "privateKey": {"algorithm": {"RSA", "ECDSA", "Ed25519"}, "size": COUNT, "rotationPolicy": {"Never", "Always"}},
        "usages": [{"server auth", "client auth", "digital signature", "key encipherment"}],
        "dnsNames": [TEXT],
        "issuerRef": NAME,
    },
    ("postgresql.cnpg.io/v1", "Cluster"): {
        "instances": COUNT,
        "imageName": TEXT,
        "postgresql": {
            "synchronous": {
                "method": {"any", "first"},
                "number": COUNT,
                "dataDurability": {"required", "preferred"},
            },
            "parameters": LABELS,
            "pg_hba": [TEXT],
        },
        "certificates": {"serverTLSSecret": TEXT, "serverCASecret": TEXT},
        "bootstrap": {"initdb": {"database": TEXT, "owner": TEXT, "secret": NAME, "postInitSQL": [TEXT]}},
        "enableSuperuserAccess": FLAG,
        "enablePDB": FLAG,
        "affinity": {
            "enablePodAntiAffinity": FLAG,
            "topologyKey": TEXT,
            "podAntiAffinityType": {"preferred", "required"},
        },
        "storage": {"size": QUANTITY},
        "walStorage": {"size": QUANTITY},
        "resources": RESOURCES,
    },
    ("rabbitmq.com/v1beta1", "RabbitmqCluster"): {
        "replicas": COUNT,
        "image": TEXT,
        "tls": {"secretName": TEXT, "disableNonTLSListeners": FLAG},
        "rabbitmq": {"additionalConfig": TEXT},
        "persistence": {"storage": QUANTITY},
        "resources": RESOURCES,
        "terminationGracePeriodSeconds": COUNT,
        "override": {
            "statefulSet": {
                "spec": {
                    "template": {
                        "spec": {
                            "containers": [
                                {
                                    "name": {"rabbitmq"},
                                    "volumeMounts": [{"name": TEXT, "mountPath": TEXT, "readOnly": FLAG}],
                                }
                            ],
                            "volumes": [{"name": TEXT, "secret": {"secretName": TEXT}}],
                            "topologySpreadConstraints": [
                                {
                                    "maxSkew": COUNT,
                                    "topologyKey": TEXT,
                                    "whenUnsatisfiable": {"DoNotSchedule", "ScheduleAnyway"},
                                    "labelSelector": SELECTOR,
                                }
                            ],
                        }
                    }
                }
            }
        },
    },
    ("redis.redis.opstreelabs.in/v1beta2", "RedisReplication"): {
        **REDIS,
        "redisConfig": {"additionalRedisConfig": TEXT},
        "acl": {"secret": SECRET_FILES},
        "storage": {"volumeMount": VOLUMES},
    },
    ("redis.redis.opstreelabs.in/v1beta2", "RedisSentinel"): {
        **REDIS,
        "redisSentinelConfig": {
            "redisReplicationName": TEXT,
            "redisReplicationPassword": {"secretKeyRef": {"name": TEXT, "key": TEXT}},
            **dict.fromkeys(
                ("masterGroupName", "quorum", "downAfterMilliseconds", "failoverTimeout", "parallelSyncs"), TEXT
            ),
            **{name: {"yes", "no"} for name in ("resolveHostnames", "announceHostnames")},
        },
        "env": ENV,
        "volumeMount": VOLUMES,
    },
    ("keda.sh/v1alpha1", "TriggerAuthentication"): {
        "secretTargetRef": [{"parameter": TEXT, "name": TEXT, "key": TEXT}],
    },
    ("keda.sh/v1alpha1", "ScaledObject"): {
        "scaleTargetRef": NAME,
        "minReplicaCount": COUNT,
        "maxReplicaCount": COUNT,
        "pollingInterval": COUNT,
        "fallback": {
            "failureThreshold": COUNT,
            "replicas": COUNT,
            "behavior": {"static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"},
        },
        "advanced": {
            "horizontalPodAutoscalerConfig": {
                "behavior": {
                    direction: {
                        "stabilizationWindowSeconds": COUNT,
                        "policies": [{"type": {"Pods", "Percent"}, "value": COUNT, "periodSeconds": COUNT}],
                    }
                    for direction in ("scaleDown", "scaleUp")
                }
            }
        },
        "triggers": [
            {
                "type": {"rabbitmq", "prometheus"},
                "authenticationRef": NAME,
                # all are text; what each scaler reads
                "metadata": dict.fromkeys(
                    (
                        *("host", "protocol", "queueName", "mode", "value"),
                        *("serverAddress", "query", "threshold", "ignoreNullValues"),
                    ),
                    TEXT,
                ),
            }
        ],
    },
    ("monitoring.coreos.com/v1", "PodMonitor"): {
        "selector": SELECTOR,
        "podMetricsEndpoints": [
            {
                "port": TEXT,
                "interval": TEXT,
                "honorLabels": FLAG,
                "relabelings": [{"targetLabel": TEXT, "replacement": TEXT}],
            }
        ],
    },
    ("monitoring.coreos.com/v1", "PrometheusRule"): {
        "groups": [
            {
                "name": TEXT,
                "rules": [{"alert": TEXT, "expr": TEXT, "for": TEXT, "labels": LABELS, "annotations": LABELS}],
            }
        ],
    },
}


def misfits(found: Any, shape: Any, where: str) -> list[str]:
    """What of a value is not of this shape, each with its place."""
    if isinstance(shape, set):
        return [] if found in shape else [f"{where}: {found!r} is none of {sorted(shape)}"]
    if isinstance(shape, dict):
        if not isinstance(found, dict):
            return [f"{where}: {found!r} is no object"]
        wrong = [f"{where}.{name}: no such field" for name in found if name not in shape]
        return wrong + [
            each for name in found if name in shape for each in misfits(found[name], shape[name], f"{where}.{name}")
        ]
    if isinstance(shape, list):
        if not isinstance(found, list):
            return [f"{where}: {found!r} is no list"]
        return [line for i, each in enumerate(found) for line in misfits(each, shape[0], f"{where}[{i}]")]
    if type(found) is not shape:
        return [f"{where}: {found!r} is no {shape.__name__}"]
    if shape is dict:
        return [f"{where}.{name}: {value!r} is no text" for name, value in found.items() if not isinstance(value, str)]
    return []
