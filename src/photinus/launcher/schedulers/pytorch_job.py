"""The job as a PyTorchJob, version 1, of Kubeflow's training operator.

Its operator makes a service for the pod with rank 0, called NAME-master-0, and tells each pod its number in RANK.
"""

from __future__ import annotations

from .pods import MAX_RESTARTS, JobParts, pod_spec
from .yaml_text import Plain

__all__ = ["pytorch_job"]


def pytorch_job(parts: JobParts) -> dict[str, Plain]:
    """The PyTorchJob object: one Master and, with several hosts, the Workers."""
    counts = {"Master": 1, "Worker": parts.hosts - 1}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": parts.metadata(),
        "spec": {
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": MAX_RESTARTS},
            "pytorchReplicaSpecs": {
                kind: {
                    "replicas": count,
                    # The operator sets the pods' own policy from this.
                    "restartPolicy": "OnFailure",
                    "template": {
                        "spec": pod_spec(
                            parts,
                            host_rank="$(RANK)",
                            leader=f"{parts.name}-master-0",
                            port_name="pytorchjob-port",  # which the operator looks for
                            restart=None,
                        )
                    },
                }
                for kind, count in counts.items()
                if count
            },
        },
    }
