"""The job as a JobSet, version v1alpha2: one indexed Job whose pods are the hosts.

JobSet makes the headless service, so that pod i is NAME-host-0-i.NAME for all others, and Kubernetes tells each pod its
number in JOB_COMPLETION_INDEX.
"""

from __future__ import annotations

from .pods import MAX_RESTARTS, JobParts, pod_spec
from .yaml_text import Plain

__all__ = ["job_set"]

_GROUP = "host"


def job_set(parts: JobParts) -> dict[str, Plain]:
    """The JobSet object. When a pod fails for good, all are started anew, since ranks need each other."""
    leader = f"{parts.name}-{_GROUP}-0-0.{parts.name}"
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": parts.metadata(),
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": parts.name, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All"},
            "failurePolicy": {"maxRestarts": MAX_RESTARTS},
            "replicatedJobs": [
                {
                    "name": _GROUP,
                    "replicas": 1,
                    "template": {
                        "spec": {
                            "parallelism": parts.hosts,
                            "completions": parts.hosts,
                            "completionMode": "Indexed",
                            "backoffLimit": 0,
                            "template": {
                                "spec": pod_spec(
                                    parts,
                                    host_rank="$(JOB_COMPLETION_INDEX)",
                                    leader=leader,
                                    port_name="photinus",
                                    restart="Never",
                                )
                            },
                        }
                    },
                }
            ],
        },
    }
