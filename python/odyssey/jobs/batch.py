"""Jobs of cluster schedulers, as text: `sbatch` scripts of SLURM, manifests of Kubernetes.

Nothing is started here.

Both start `odyssey launch`, which picks the launcher and the PMI, restarts what fails or never
meets, and stops with a checkpoint and exit code 75 on SIGTERM; what is left for the scheduler is to
send that signal in time, and to start the job again. Formats: sbatch(1); MPIJob v2beta1 of the
Kubeflow MPI operator; Job batch/v1; the queue label of Kueue.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError
from ..launch import MOST

# of Kubernetes, with room for "-launcher-xxxxx"
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,51}[a-z0-9])?", re.ASCII)
# of a line "#SBATCH": no space, quote or control character
_WORD = re.compile(r"-[\w.,:/@%+=*()\[\]{}$~-]+", re.ASCII)
_ARRAY = re.compile(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?", re.ASCII)
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}", re.ASCII)
_RESERVED_OPTION = re.compile(
    r"(-[NntaJ]|--(nodes|ntasks|ntasks-per-node|time|array|job-name|signal)(=|$))"
)
_CPUS = re.compile(r"\d+(\.\d+)?m?", re.ASCII)
_BYTES = re.compile(r"\d+(\.\d+)?([kMGT]|[KMGT]i)?", re.ASCII)
_IMAGE = re.compile(r"\w[\w.:/@+-]*", re.ASCII)
FORMS = ("mpijob", "job", "elastic")
HOME = "/home/odyssey"  # as the Dockerfile has it


def name_of(command: Sequence[str]) -> str:
    """A job's name from what it starts: "my_train.py" is "my-train"."""
    word = next((word for word in command if not word.startswith("-")), "job")
    word = (
        word
        if "/" not in word and command[0] == "-m"
        else word.rpartition("/")[2].removesuffix(".py")
    )
    return re.sub(r"[^a-z0-9]+", "-", word.lower()).strip("-")[:40].strip("-") or "job"


def _checked(name: str, value: str, pattern: re.Pattern[str], allowed: str) -> str:
    if not pattern.fullmatch(value):
        raise ConfigError(f"[batch] {name} is {ascii(value[:60])}; {allowed}")
    return value


def _count(name: str, value: int) -> int:
    if not 1 <= value <= MOST:
        raise ConfigError(f"[batch] {name} is {value}; a whole number from 1 is allowed")
    return value


_SCRIPT = """\
# Asked to end before the time limit, the job stops with a checkpoint and is queued again: the
# same command goes on. One that is cancelled stays so; after the loss of a node, or a
# preemption, SLURM itself queues it again (--requeue).
{setup}
limit=
{command} &
launcher=$!
trap 'kill -TERM $launcher' TERM
trap 'limit=reached; kill -TERM $launcher' USR1
while wait $launcher; code=$?; kill -0 $launcher 2>/dev/null; do :; done
{end}if [ "$code" = 75 ] && [ -n "$limit" ]; then
    scontrol requeue "$SLURM_JOB_ID" && sleep 60 # until SLURM ends this run of it
fi
exit "$code"
"""


def slurm(
    command: Sequence[str],
    *,
    nodes: int,
    ntasks_per_node: int,
    name: str,
    run_dir: str | None = None,
    options: Sequence[str] = (),
    time: str | None = None,
    array: str | None = None,
    warn: int = 120,
    scratch: str | None = None,
    cache: str | None = None,
    setup: Sequence[str] = (),
    launch: Sequence[str] = (),
) -> str:
    """A script for sbatch.

    Args:
        command: what `odyssey launch` starts. "{task}" in a word of it becomes the number of a job
            array's task.
        nodes, ntasks_per_node: their product is the number of ranks. name: of the job. run_dir:
            default runs/NAME-JOB, for each task of an array its own.
        options: more of sbatch's, such as "--partition=long". time: the limit, as sbatch takes it.
            array: such as "0-9%2". warn: seconds before the limit at which it is stopped. scratch:
            a directory of each node; in it one for the job's temporary files is made and removed.
            cache: where compiled kernels are kept. setup: lines of shell before the start.
        launch: more options of `odyssey launch`.

    Raises ConfigError: a value that has no place in a script, or that sbatch would not take.
    """
    ranks = _count("-N", nodes) * _count("--ntasks-per-node", ntasks_per_node)
    job = "${SLURM_ARRAY_JOB_ID}-${SLURM_ARRAY_TASK_ID}" if array else "${SLURM_JOB_ID}"
    directives = [
        f"--job-name={name}",
        f"--nodes={nodes}",
        f"--ntasks-per-node={ntasks_per_node}",
        "--requeue",
    ]
    directives += [
        "--open-mode=append",
        f"--output={name}-{'%A-%a' if array else '%j'}.out",
        f"--signal=B:USR1@{warn}",
    ]
    numbers = "such as 0-9, 0-9%2 or 1,3,5-7 is allowed"
    directives += [f"--array={_checked('--array', array, _ARRAY, numbers)}"] if array else []
    directives += [f"--time={time}"] if time else []
    if time and 0 < _seconds(time) <= warn:
        raise ConfigError(
            f"[batch] --time {time} ends within --warn {warn} seconds; give more time, or less "
            "to --warn"
        )
    if not array and any("{task}" in word for word in command):
        raise ConfigError(
            "[batch] {task} is the number of a job array's task; give --array, such as 0-9"
        )
    for option in options:
        if _RESERVED_OPTION.match(option):
            raise ConfigError(
                f"[batch] --sbatch {ascii(option[:60])}; `odyssey slurm` has an option of its "
                "own for it"
            )
    words = "an option such as --partition=long, without spaces and quotes, is allowed"
    head = ["#!/bin/bash", "# Written by `odyssey slurm`; submit it with sbatch."]
    head += [
        f"#SBATCH {_checked('--sbatch', option, _WORD, words)}"
        for option in (*directives, *options)
    ]
    for line in setup:
        if not line.isprintable():
            raise ConfigError(f"[batch] --setup {ascii(line[:60])}; one line is allowed")
    setup_lines = list(setup)
    end = ""
    if scratch is not None:
        place = f'{_path_for_shell(scratch)}/odyssey-"$SLURM_JOB_ID"'
        everywhere = "srun --ntasks-per-node=1 --ntasks=$SLURM_JOB_NUM_NODES"
        setup_lines += [f"export TMPDIR={place}", f'{everywhere} mkdir -p "$TMPDIR"']
        end = f'{everywhere} rm -rf "$TMPDIR"\n'
    if cache is not None:
        setup_lines.append(f"export ODYSSEY_CACHE_DIR={shlex.quote(cache)}")
    place = (
        f'runs/{name}-"{job}"'
        if run_dir is None
        else f"{shlex.quote(run_dir)}" + (f'-"{job}"' if array else "")
    )
    start = [
        shlex.quote(sys.executable),
        "-m odyssey launch",
        f"-n {ranks}",
        f"--run-dir {place}",
        *map(_word, launch),
    ]
    script = _SCRIPT.format(
        setup="\n".join(setup_lines), command=" ".join([*start, *map(_word, command)]), end=end
    )
    return "\n".join([*head, "", script])


def _path_for_shell(path: str) -> str:
    """Returns a path for the script, whose `~` and variables the shell of the job expands.

    The script stops if a variable isn't set. Everything else is quoted.
    """
    home = re.match(r"(?:~[\w.-]*(?=/|$)/?)?", path)[0]
    # Text, a name in braces and a name without take turns.
    parts = re.split(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))", path[len(home) :], flags=re.ASCII)
    words = [home]
    for position, part in enumerate(parts):
        if part:
            is_name = position % 3 > 0
            words.append(f'"${{{part}:?is not set}}"' if is_name else shlex.quote(part))
    return "".join(words)


def _seconds(time: str) -> int:
    """Seconds of a time limit as sbatch(1) has it: D-H[:M[:S]], H:M:S, M:S or M; 0: none.

    Raises ConfigError.
    """
    _checked("--time", time, _TIME, "such as 90 (minutes), 4:00:00 or 2-12:00:00 is allowed")
    days, _, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    units = (3600, 60, 1) if days or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(
        part * unit for part, unit in zip(parts, units, strict=False)
    )


def _word(word: str) -> str:
    """A word of the command for the shell, with the number of the array's task where it asks for
    it.
    """
    return (
        '"${SLURM_ARRAY_TASK_ID}"'.join(
            shlex.quote(part) if part else "" for part in word.split("{task}")
        )
        or "''"
    )


def kubernetes(  # noqa: PLR0915
    command: Sequence[str],
    *,
    image: str,
    ranks: int,
    name: str,
    form: str = "mpijob",
    slots: int | None = None,
    queue: str | None = None,
    claim: str | None = None,
    gpus: int = 0,
    cpu: str = "1",
    memory: str = "2Gi",
    shm: str = "1Gi",
    least: int | None = None,
) -> dict[str, Any]:
    """A manifest, as objects: `text` makes YAML of it.

    Args:
        command: what `odyssey launch` starts in the image.
        form: "mpijob": a launcher and `ranks` / `slots` workers; "job": all ranks in one pod;
            "elastic": the same, going on with `least` (1) ranks or more. slots: ranks (1) of a
            worker. queue: Kueue's, for which it waits.
        claim: a PersistentVolumeClaim for run directories. An MPIJob's launcher and workers are
            pods that must share them (ReadWriteMany): without one its name is "runs". A Job's end
            with the pod where there is none.
        gpus: of a rank. cpu, memory: of a rank. shm: of a pod's /dev/shm, which ranks exchange
            through.

    Raises ConfigError: what Kubernetes does not take, ranks that slots do not divide, or an option
    of another form.
    """
    names = "small letters, digits and '-' are allowed, at most 53"
    for option, value in (("--name", name), ("--queue", queue), ("--claim", claim)):
        if value is not None:
            _checked(option, value, _NAME, names)
    _checked("--image", image, _IMAGE, "letters, digits and . _ : / @ + - are allowed")
    _checked("--cpu", cpu, _CPUS, "a quantity such as 2 or 500m is allowed")
    for option, value in (("--memory", memory), ("--shm", shm)):
        _checked(option, value, _BYTES, "a quantity such as 512Mi or 4Gi is allowed")
    if form not in FORMS:
        raise ConfigError(f"[batch] --form {form!r} is unknown; choose from {', '.join(FORMS)}")
    for option, value, of_form in (("--slots", slots, "mpijob"), ("--least", least, "elastic")):
        if value is not None and form != of_form:
            raise ConfigError(
                f"[batch] {option} {value} is of --form {of_form}, and this is {form}; leave it out"
            )
    slots = 1 if slots is None else _count("--slots", slots)
    least = 1 if least is None else _count("--least", least)
    if least > _count("-n", ranks):
        raise ConfigError(
            f"[batch] --least {least} is more than -n {ranks}; at most {ranks} is allowed"
        )
    claim = claim or ("runs" if form == "mpijob" else None)
    if form == "mpijob" and ranks % slots:
        raise ConfigError(
            f"[batch] -n {ranks} is no multiple of --slots {slots}; every worker has as many ranks"
        )
    run = f"/runs/{name}"
    launch = ["odyssey", "launch", "-n", str(ranks), "--run-dir", run]
    labels = {"labels": {"kueue.x-k8s.io/queue-name": queue}} if queue else {}
    meta = {"name": name, **labels}
    # Kubernetes: "$$" is "$", and "$(A)" a variable
    command = [word.replace("$", "$$") for word in command]

    def pod(words: list[str], count: int, gpus: int = gpus, **container: Any) -> dict[str, Any]:
        limits = {"cpu": _times(cpu, count), "memory": _times(memory, count)}
        limits |= {"nvidia.com/gpu": gpus * count} if gpus else {}
        mounts = [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "runs", "mountPath": "/runs"}]
        volumes = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shm}}]
        run_storage = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}
        volumes.append({"name": "runs", **run_storage})
        safe = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        one = {"name": "odyssey", "image": image, "command": words, "securityContext": safe}
        user = {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000}
        # the Pod Security Standard "restricted" asks for it
        user["seccompProfile"] = {"type": "RuntimeDefault"}
        one |= {
            "resources": {"requests": limits, "limits": limits},
            "volumeMounts": mounts,
            **container,
        }
        # as long as ranks may take to stop with a checkpoint (odyssey launch --grace, four times of
        # it while writing)
        spec = {
            "terminationGracePeriodSeconds": 150,
            "securityContext": user,
            "containers": [one],
            "volumes": volumes,
        }
        return {"spec": spec}

    # its ranks answer: it fails where the launcher has ended, or nothing of the job lives. A hang
    # is the watchdog's.
    look = {"exec": {"command": ["odyssey", "top", "--once", "--json", run]}, "timeoutSeconds": 20}
    probe = {
        "livenessProbe": {
            **look,
            "initialDelaySeconds": 300,
            "periodSeconds": 60,
            "failureThreshold": 10,
        }
    }
    if form == "mpijob":
        ssh = ["/usr/sbin/sshd", "-De", "-f", f"{HOME}/.sshd_config"]
        ready = {"readinessProbe": {"tcpSocket": {"port": 2222}, "initialDelaySeconds": 2}}
        # workers come up one after the other: a start that finds none is taken again
        start = "--hostfile /etc/mpi/hostfile --launcher mpirun --max-restarts 10 --backoff 5"
        words = [*launch, *start.split()]
        # hosts that are new with each job: their keys, which the operator makes, are taken as they
        # come
        ssh_options = (
            "-o StrictHostKeyChecking=accept-new -o "
            "UserKnownHostsFile=/tmp/known_hosts -o BatchMode=yes"
        )
        env = {"env": [{"name": "HYDRA_LAUNCHER_EXTRA_ARGS", "value": ssh_options}]}
        template = pod([*words, *command], 1, gpus=0, **env, **probe)
        replicas = {
            "Launcher": {"replicas": 1, "restartPolicy": "OnFailure", "template": template},
            "Worker": {"replicas": ranks // slots, "template": pod(ssh, slots, **ready)},
        }
        spec = {
            "slotsPerWorker": slots,
            "mpiImplementation": "MPICH",
            "sshAuthMountPath": f"{HOME}/.ssh",
        }
        spec |= {
            "runPolicy": {
                "cleanPodPolicy": "Running",
                "backoffLimit": 20,
                **({"suspend": True} if queue else {}),
            }
        }
        head = {"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "metadata": meta}
        return {**head, "spec": {**spec, "mpiReplicaSpecs": replicas}}
    if form == "elastic":
        launch += ["--elastic", f"{least}:{ranks}"]
    template = pod([*launch, *command], ranks, **probe)
    template["spec"]["restartPolicy"] = "Never"
    # 75: stopped with a checkpoint, as a pod that is drained is; the next pod goes on and no
    # failure is counted
    stopped = {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [75]}}
    policy = {
        "backoffLimit": 6,
        "podFailurePolicy": {"rules": [stopped]},
        **({"suspend": True} if queue else {}),
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": meta,
        "spec": {**policy, "template": template},
    }


def _times(quantity: str, count: int) -> str:
    number, unit = re.fullmatch(r"([0-9.]+)(\D*)", quantity).groups()  # type: ignore[union-attr]
    return f"{float(number) * count:.15g}{unit}"


def text(value: Any, indent: int = 0) -> str:
    """YAML of objects as JSON has them; all strings are quoted, so that none is taken for
    another type.
    """
    if isinstance(value, dict) and value:
        lines = []
        for key, item in value.items():
            nested = isinstance(item, (dict, list)) and item
            gap = "\n" + " " * (indent + 2) if nested else " "
            lines.append(f"{key}:{gap}{text(item, indent + 2)}")
        return ("\n" + " " * indent).join(lines)
    if isinstance(value, list) and value:
        if not any(isinstance(item, (dict, list)) for item in value):
            return json.dumps(value)
        return ("\n" + " " * indent).join(f"- {text(item, indent + 2)}" for item in value)
    return json.dumps(value)
