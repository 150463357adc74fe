"""`pycoll k8s manifest`: what Kubernetes needs to run a job, as YAML.

A Secret with the job's key, a Service by which pods find each other, and an Indexed Job, in each
pod of which `pycoll-run` is called.
Source: https://kubernetes.io/docs/concepts/workloads/controllers/job/
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

_PORT = 29400
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # of a Service, after RFC 1035
_MAX_NAME = 52  # a pod's name adds -INDEX-xxxxx, and is at most 63 characters
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    manifest = actions.add_parser(
        "manifest",
        help="print the YAML of a job",
        description="Print the YAML of a job, for kubectl apply -f -. Options of pycoll-run go "
        "between -- and the script.",
        usage="pycoll k8s manifest --image I [options] [-- options of pycoll-run] script.py ...",
    )
    add = manifest.add_argument
    add("--name", default="pycoll", metavar="NAME", help="of the job (default: pycoll)")
    add("--image", required=True, metavar="I", help="a container's image that has pycoll")
    add("--nodes", type=int, default=2, metavar="K", help="pods (default: 2)")
    add(
        "-n",
        "--ranks",
        dest="size",
        type=int,
        metavar="N",
        help="ranks of all pods (default: one a pod)",
    )
    add("--cpus", metavar="C", help="cores of a pod, as 4 (default: what the cluster gives)")
    add("--memory", metavar="M", help="memory of a pod, as 16Gi")
    add("--gpus", type=int, default=0, metavar="G", help="nvidia.com/gpu of a pod")
    add("program", nargs=argparse.REMAINDER, help="what pycoll-run is given")


def main(arguments: argparse.Namespace) -> int:
    """Print the manifest.

    Raises:
        ValueError: an option makes no sense.
    """
    print(manifest(arguments), end="")
    return 0


def manifest(arguments: argparse.Namespace) -> str:
    """The documents, with a new key.

    Raises:
        ValueError: an option makes no sense.
    """
    name, nodes = arguments.name, arguments.nodes
    size = arguments.size if arguments.size is not None else nodes
    if not _NAME.fullmatch(name) or len(name) > _MAX_NAME:
        raise ValueError(
            f"--name {name!r}: lower-case letters, digits and '-', a letter first, at most "
            f"{_MAX_NAME} characters"
        )
    if nodes < 1 or size < nodes:
        raise ValueError(f"-n {size} on {nodes} nodes: each needs a rank")
    program = arguments.program[arguments.program[:1] == ["--"] :]
    if not program:
        raise ValueError("which program? pycoll k8s manifest --image I script.py")
    if arguments.gpus < 0:
        raise ValueError(f"--gpus {arguments.gpus} is less than none")
    wanted = {"cpu": arguments.cpus, "memory": arguments.memory}
    resources = {key: value for key, value in wanted.items() if value is not None}
    if arguments.gpus:
        resources["nvidia.com/gpu"] = str(arguments.gpus)
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/component": "pycoll"}
    container = {
        "name": "pycoll",
        "image": arguments.image,
        "command": ["pycoll-run", "-n", str(size), *program],
        "env": [
            {"name": "PYCOLL_NODE", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
            {"name": "PYCOLL_NODES", "value": str(nodes)},
            {"name": "PYCOLL_RENDEZVOUS", "value": f"tcp://{name}-0.{name}:{_PORT}"},
            {
                "name": "PYCOLL_KEY",
                "valueFrom": {"secretKeyRef": {"name": name, "key": "key"}},
            },
        ],
        "resources": {"limits": resources},
    }
    documents: list[Mapping[str, Any]] = [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "labels": labels},
            "stringData": {"key": os.urandom(32).hex()},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "clusterIP": "None",  # a name for each pod
                "publishNotReadyAddresses": True,
                "selector": {"job-name": name},
            },
        },
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "completionMode": "Indexed",
                "completions": nodes,
                "parallelism": nodes,
                "backoffLimit": 0,
                "template": {
                    "metadata": {"labels": labels},
                    "spec": {
                        "subdomain": name,
                        "restartPolicy": "Never",
                        "containers": [container],
                    },
                },
            },
        },
    ]
    return "---\n".join("\n".join(_yaml(document)) + "\n" for document in documents)


def _yaml(value: Any) -> list[str]:
    """A value as lines of YAML: maps and lists in blocks, all else as JSON, which YAML includes."""
    if isinstance(value, Mapping) and value:
        lines = []
        for key, item in value.items():
            inner = _yaml(item)
            if not item or not isinstance(item, Mapping | list):
                lines.append(f"{key}: {inner[0]}")
            else:
                lines += [f"{key}:", *(f"  {line}" for line in inner)]
        return lines
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        lines = []
        for item in value:
            first, *rest = _yaml(item)
            lines += [f"- {first}", *(f"  {line}" for line in rest)]
        return lines
    return [json.dumps(value)]
