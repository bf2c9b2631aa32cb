"""Manifests for Kubeflow: a TrainJob and its runtime (Trainer v2), or a PyTorchJob (Training Operator)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from mt_megatron.errors import ConfigError
from mt_megatron.launching.jobs.job import LaunchJob

RESOURCES = {"nvidia": "nvidia.com/gpu", "mthreads": "mthreads.com/gpu", "none": None}
"""Vendor -> the name under which its device plugin offers devices."""

_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]i?|Ki)?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_GRACE_SECONDS = 600
_SHARED_MEMORY = "shared-memory"


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """What Kubernetes alone wants to know."""

    image: str
    """Container image that holds Python, torch and mt_megatron."""

    kind: Literal["TrainJob", "PyTorchJob"] = "TrainJob"
    namespace: str = "default"
    vendor: Literal["nvidia", "mthreads", "none"] = "nvidia"
    shared_memory: str = "64Gi"
    """Limit of ``/dev/shm``, which data loaders and collectives use; it counts as the pod's memory."""

    cpu: str | None = None
    """Processors of a pod. None: no request."""

    memory: str | None = None
    """Memory of a pod. None: no request."""

    claims: tuple[tuple[str, str], ...] = ()
    """Persistent volume claims and where they are mounted."""


def manifests(job: LaunchJob, kubernetes: KubernetesOptions) -> list[dict[str, Any]]:
    """The documents in the order in which they are to be applied. Raises ``ConfigError``."""
    _check(kubernetes)
    if kubernetes.kind == "PyTorchJob":
        return [_pytorch_job(job, kubernetes)]
    return [_runtime(job, kubernetes), _train_job(job, kubernetes)]


def manifest_yaml(job: LaunchJob, kubernetes: KubernetesOptions) -> str:
    """``manifests`` as YAML for ``kubectl apply -f``."""
    import yaml

    heading = "# Made by mt-megatron launch --print k8s. Submit it: kubectl apply -f FILE\n"
    documents = manifests(job, kubernetes)
    text: str = yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True)
    if "\x85" in text:
        # PyYAML writes this one as it is, and it is read as the end of a line.
        text = yaml.safe_dump_all(documents, sort_keys=False)
    return heading + text


def escaped(text: str) -> str:
    """``text`` so that Kubernetes' expansion of ``$(NAME)`` and ``$$`` gives it back unchanged."""
    return text.replace("$", "$$")


def _check(kubernetes: KubernetesOptions) -> None:
    found = []
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", kubernetes.image):
        found.append(f"--image is {kubernetes.image!r}; expected a name such as registry/name:tag.")
    if not _NAME.fullmatch(kubernetes.namespace) or "." in kubernetes.namespace:
        found.append(f"--namespace is {kubernetes.namespace!r}; expected small letters, digits and hyphens.")
    for option, value in (
        ("--shared-memory", kubernetes.shared_memory),
        ("--cpu", kubernetes.cpu),
        ("--memory", kubernetes.memory),
    ):
        if value is not None and not _QUANTITY.fullmatch(value):
            found.append(f"{option} is {value!r}; expected a quantity such as 64Gi or 16.")
    for claim, path in kubernetes.claims:
        if not _NAME.fullmatch(claim) or not path.startswith("/") or ":" in path:
            found.append(f"--volume has {claim}:{path}; expected CLAIM:/PATH.")
    paths = [path for _, path in kubernetes.claims]
    if len(set(paths)) < len(paths) or "/dev/shm" in paths:
        found.append("--volume mounts two volumes at one path; expected a path of its own for each.")
    if found:
        raise ConfigError("\n".join(found))


def _metadata(job: LaunchJob, kubernetes: KubernetesOptions) -> dict[str, Any]:
    return {"name": job.name, "namespace": kubernetes.namespace}


def _runtime(job: LaunchJob, kubernetes: KubernetesOptions) -> dict[str, Any]:
    # A runtime of the job's own: how a TrainJob overrides a shared one differs between the releases.
    pod = _pod(kubernetes, "node", {}) | {"restartPolicy": "Never"}
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _metadata(job, kubernetes) | {"labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": job.nodes, "torch": {}},
            "template": {
                "spec": {
                    # Training resumes from its last checkpoint whenever all pods are made anew.
                    "failurePolicy": {"maxRestarts": job.max_restarts},
                    "replicatedJobs": [
                        {
                            "name": "node",
                            "template": {
                                "metadata": {"labels": labels},
                                "spec": {"backoffLimit": 0, "template": {"spec": pod}},
                            },
                        }
                    ],
                }
            },
        },
    }


def _train_job(job: LaunchJob, kubernetes: KubernetesOptions) -> dict[str, Any]:
    resources = _resources(job, kubernetes)
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job, kubernetes),
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": job.name,
            },
            "trainer": {
                "image": kubernetes.image,
                "command": _command(job),
                "args": _arguments(job),
                "numNodes": job.nodes,
                "numProcPerNode": job.processes_per_node,
                **({"env": _environment(job)} if job.variables() else {}),
                **({"resourcesPerNode": resources} if resources else {}),
            },
        },
    }


def _pytorch_job(job: LaunchJob, kubernetes: KubernetesOptions) -> dict[str, Any]:
    resources = _resources(job, kubernetes)
    runs = {
        "command": _command(job),
        "args": _arguments(job),
        **({"env": _environment(job)} if job.variables() else {}),
        **({"resources": resources} if resources else {}),
    }
    pod = _pod(kubernetes, "pytorch", runs)
    replicas = {"Master": 1, "Worker": job.nodes - 1}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(job, kubernetes),
        "spec": {
            "nprocPerNode": str(job.processes_per_node),
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": job.max_restarts},
            "pytorchReplicaSpecs": {
                name: {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": pod}}
                for name, count in replicas.items()
                if count
            },
        },
    }


def _command(job: LaunchJob) -> list[str]:
    words = [job.python, "-m", "mt_megatron.cli", "launch", "--from-environment"]
    words += ["--python", job.python]
    words += ["--nodes", str(job.nodes), "--gpus-per-node", str(job.processes_per_node)]
    return [escaped(word) for word in words]


def _arguments(job: LaunchJob) -> list[str]:
    return ["--", *(escaped(option) for option in job.options)]


def _environment(job: LaunchJob) -> list[dict[str, str]]:
    return [{"name": name, "value": escaped(value)} for name, value in job.variables().items()]


def _resources(job: LaunchJob, kubernetes: KubernetesOptions) -> dict[str, Any]:
    amounts: dict[str, str] = {}
    if kubernetes.cpu is not None:
        amounts["cpu"] = kubernetes.cpu
    if kubernetes.memory is not None:
        amounts["memory"] = kubernetes.memory
    devices = RESOURCES[kubernetes.vendor]
    if devices is not None:
        amounts[devices] = str(job.processes_per_node)
    # Devices must be requested in the amount that limits them.
    return {"requests": amounts, "limits": dict(amounts)} if amounts else {}


def _pod(kubernetes: KubernetesOptions, container: str, runs: dict[str, Any]) -> dict[str, Any]:
    mounts = [{"name": _SHARED_MEMORY, "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [
        {"name": _SHARED_MEMORY, "emptyDir": {"medium": "Memory", "sizeLimit": kubernetes.shared_memory}}
    ]
    claims = list(dict.fromkeys(claim for claim, _ in kubernetes.claims))
    for claim, path in kubernetes.claims:
        mounts.append({"name": f"claim-{claims.index(claim)}", "mountPath": path})
    for index, claim in enumerate(claims):
        volumes.append({"name": f"claim-{index}", "persistentVolumeClaim": {"claimName": claim}})
    return {
        # At SIGTERM training saves and ends by itself; this is how long it may take.
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "containers": [
            {"name": container, "image": kubernetes.image, **runs, "volumeMounts": mounts},
        ],
        "volumes": volumes,
    }
