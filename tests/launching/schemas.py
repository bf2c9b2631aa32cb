"""JSON schemas of the manifests that are rendered, from the published API: names, types, what is required.

Own work after the API reference of Kubeflow Trainer (``trainer.kubeflow.org/v1alpha1``), Training Operator
(``kubeflow.org/v1``), JobSet and Kubernetes' PodSpec. Everything that is not named here is refused, so that a
misspelt field is found as a server with strict field validation would find it.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def fields(required: str = "", /, **properties: Schema) -> Schema:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": {name.rstrip("_"): schema for name, schema in properties.items()},
        "required": required.split(),
        "additionalProperties": False,
    }


def many(items: Schema, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least}


TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
LABELS: Schema = {"type": "object", "additionalProperties": TEXT}
DNS_LABEL: Schema = {"type": "string", "pattern": "^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"}
QUANTITY: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?$"}
AMOUNTS: Schema = {
    "type": "object",
    "propertyNames": {"enum": ["cpu", "memory", "nvidia.com/gpu", "mthreads.com/gpu"]},
    "additionalProperties": QUANTITY,
}
RESOURCES = fields("", requests=AMOUNTS, limits=AMOUNTS)
VARIABLE = fields("name value", name={"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"}, value=TEXT)
METADATA = fields("name", name=DNS_LABEL, namespace=DNS_LABEL, labels=LABELS)

CONTAINER = fields(
    "name image",
    name=DNS_LABEL,
    image=TEXT,
    command=many(TEXT, 1),
    args=many(TEXT),
    env=many(VARIABLE),
    resources=RESOURCES,
    volumeMounts=many(
        fields("name mountPath", name=DNS_LABEL, mountPath={"type": "string", "pattern": "^/"})
    ),
)
VOLUME: Schema = {
    "oneOf": [
        fields(
            "name emptyDir",
            name=DNS_LABEL,
            emptyDir=fields("", medium={"enum": ["", "Memory"]}, sizeLimit=QUANTITY),
        ),
        fields(
            "name persistentVolumeClaim",
            name=DNS_LABEL,
            persistentVolumeClaim=fields("claimName", claimName=TEXT, readOnly={"type": "boolean"}),
        ),
    ]
}
POD = fields(
    "containers",
    containers=many(CONTAINER, 1),
    volumes=many(VOLUME),
    restartPolicy={"enum": ["Always", "OnFailure", "Never"]},
    terminationGracePeriodSeconds=COUNT,
)
JOB = fields(
    "template", backoffLimit=COUNT, template=fields("spec", metadata=fields("", labels=LABELS), spec=POD)
)

TRAINING_RUNTIME = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "trainer.kubeflow.org/v1alpha1"},
    kind={"const": "TrainingRuntime"},
    metadata=METADATA,
    spec=fields(
        "template",
        mlPolicy=fields("", numNodes={"type": "integer", "minimum": 1}, torch=fields()),
        template=fields(
            "spec",
            spec=fields(
                "replicatedJobs",
                failurePolicy=fields("", maxRestarts=COUNT),
                replicatedJobs=many(
                    fields(
                        "name template",
                        name=DNS_LABEL,
                        template=fields("spec", metadata=fields("", labels=LABELS), spec=JOB),
                    ),
                    1,
                ),
            ),
        ),
    ),
)
TRAIN_JOB = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "trainer.kubeflow.org/v1alpha1"},
    kind={"const": "TrainJob"},
    metadata=METADATA,
    spec=fields(
        "runtimeRef",
        runtimeRef=fields(
            "name",
            apiGroup={"const": "trainer.kubeflow.org"},
            kind={"enum": ["TrainingRuntime", "ClusterTrainingRuntime"]},
            name=DNS_LABEL,
        ),
        trainer=fields(
            "",
            image=TEXT,
            command=many(TEXT),
            args=many(TEXT),
            env=many(VARIABLE),
            numNodes={"type": "integer", "minimum": 1},
            numProcPerNode={"type": "integer", "minimum": 1},
            resourcesPerNode=RESOURCES,
        ),
    ),
)
REPLICA = fields(
    "replicas template",
    replicas={"type": "integer", "minimum": 1},
    restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    template=fields("spec", spec=POD),
)
PYTORCH_JOB = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "kubeflow.org/v1"},
    kind={"const": "PyTorchJob"},
    metadata=METADATA,
    spec=fields(
        "pytorchReplicaSpecs",
        nprocPerNode={"type": "string", "pattern": "^(auto|cpu|gpu|[1-9][0-9]*)$"},
        runPolicy=fields("", cleanPodPolicy={"enum": ["All", "Running", "None"]}, backoffLimit=COUNT),
        pytorchReplicaSpecs=fields("Master", Master=REPLICA, Worker=REPLICA),
    ),
)
SCHEMAS = {"TrainingRuntime": TRAINING_RUNTIME, "TrainJob": TRAIN_JOB, "PyTorchJob": PYTORCH_JOB}
