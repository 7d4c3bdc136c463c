"""Job scripts of SLURM and manifests of Kubernetes, as text. tests/beds/test_slurm.py submits
the scripts.
"""

from __future__ import annotations

import copy
import gzip
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from odyssey.errors import ConfigError
from odyssey.jobs import batch

CRD = Path(__file__).parents[1] / "third_party" / "mpi-operator" / "kubeflow.org_mpijobs.yaml.gz"
JSON = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
    "number": (int, float),
}


def test_a_path_of_a_script_is_expanded_by_the_job(tmp_path):
    """The shell of the job makes of it what odyssey would make of it there."""
    random = Random(0)
    pieces = "~ / ${HOME} ${PLACE} a ü ' \" . - $(echo ` *".split(" ") + [" "]
    paths = ["".join(random.choices(pieces, k=random.randint(1, 8))) for _ in range(200)]
    paths = ["~", "~/a b", "$PLACE/$HOME", *paths]
    environment = {"HOME": "/home/a b", "PLACE": "/x y/*"}
    words = " ".join(map(batch._path_for_shell, paths))
    shell = ["bash", "-uc", f"printf '%s\\n' {words}"]
    done = subprocess.run(shell, env=environment, capture_output=True, text=True, check=True)
    for path, shown in zip(paths, done.stdout.split("\n")[:-1], strict=True):
        expected = path.replace("$HOME", "${HOME}").replace("$PLACE", "${PLACE}")
        expected = expected.replace("${HOME}", "/home/a b").replace("${PLACE}", "/x y/*")
        if path == "~" or path.startswith("~/"):
            expected = f"/home/a b{expected[1:]}"
        assert shown == expected, path
    unset = subprocess.run(
        ["bash", "-c", f"echo {batch._path_for_shell('$NOT_SET/a')}"],
        env={},
        capture_output=True,
        text=True,
    )
    assert unset.returncode and "NOT_SET: is not set" in unset.stderr


def validate(value, schema, where=""):
    """Raises ValueError: not of an OpenAPI schema as CRDs have them, or a key that it does not
    name, which a cluster would drop without a word.
    """
    if schema.get("x-kubernetes-int-or-string"):
        if type(value) not in (int, str):
            raise ValueError(f"{where} is {value!r}")
        if type(value) is str and not re.search(schema.get("pattern", ""), value):
            raise ValueError(f"{where} is {value!r}")
        return
    if not isinstance(value, JSON[schema["type"]]) or (type(value) is bool) != (
        schema["type"] == "boolean"
    ):
        raise ValueError(f"{where} is {value!r}, no {schema['type']}")
    if value not in schema.get("enum", [value]):
        raise ValueError(f"{where} is {value!r}, not of {schema['enum']}")
    if isinstance(value, list):
        for n, item in enumerate(value):
            validate(item, schema["items"], f"{where}[{n}]")
    elif isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        for key in schema.get("required", []):
            if key not in value:
                raise ValueError(f"{where} has no {key}")
        for key, item in value.items():
            if key in known:
                validate(item, known[key], f"{where}.{key}")
            elif others:
                validate(item, others, f"{where}.{key}")
            elif where:  # `metadata` is the API server's own
                raise ValueError(f"{where}.{key} is unknown")


@pytest.fixture(scope="module")
def schema():
    yaml = pytest.importorskip("yaml")
    (version,) = yaml.safe_load(gzip.decompress(CRD.read_bytes()))["spec"]["versions"]
    assert version["name"] == "v2beta1"
    schema = version["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"]["additionalProperties"] = {
        "type": "object",
        "additionalProperties": {"type": "string"},
    }
    schema["properties"]["metadata"]["properties"] = {"name": {"type": "string"}}
    return schema


ALL = {
    "image": "registry/odyssey:0.2.0",
    "ranks": 16,
    "name": "train",
    "slots": 4,
    "queue": "team",
    "claim": "runs",
}
ALL |= {"gpus": 1, "cpu": "500m", "memory": "1.5Gi", "shm": "2Gi"}


@pytest.mark.parametrize("given", [ALL, {"image": "I", "ranks": 3, "name": "a-b"}])
def test_an_mpijob_is_as_its_operator_has_it(schema, given):
    made = batch.kubernetes(["train.py", "--lr", "0.1"], **given)
    validate(made, schema, "MPIJob")
    worker = made["spec"]["mpiReplicaSpecs"]["Worker"]
    assert worker["replicas"] * made["spec"]["slotsPerWorker"] == given["ranks"]
    for key, wrong in (("slotsPerWorker", "4"), ("slotPerWorker", 4)):
        bad = copy.deepcopy(made)
        bad["spec"][key] = wrong
        with pytest.raises(ValueError, match=f"MPIJob.spec.{key} is"):
            validate(bad, schema, "MPIJob")
    worker["template"]["spec"]["securityContext"]["runAsNonroot"] = True
    with pytest.raises(ValueError, match="runAsNonroot is unknown"):
        validate(made, schema, "MPIJob")


def test_what_an_mpijob_says(schema):
    spec = batch.kubernetes(["train.py"], **ALL)["spec"]
    launcher, worker = (
        spec["mpiReplicaSpecs"][name]["template"]["spec"] for name in ("Launcher", "Worker")
    )
    assert spec["runPolicy"]["suspend"] is True  # Kueue lets it go
    assert worker["containers"][0]["resources"]["limits"] == {
        "cpu": "2000m",
        "memory": "6Gi",
        "nvidia.com/gpu": 4,
    }
    assert launcher["containers"][0]["resources"]["limits"] == {"cpu": "500m", "memory": "1.5Gi"}
    for pod in (launcher, worker):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}} in pod[
            "volumes"
        ]
        assert {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}} in pod["volumes"]
    assert "top" in launcher["containers"][0]["livenessProbe"]["exec"]["command"]


@pytest.mark.parametrize("form", ["job", "elastic"])
def test_a_job_of_one_pod(schema, form):
    made = batch.kubernetes(
        ["train"], **{**ALL, "form": form, "slots": None, "least": 2 if form == "elastic" else None}
    )
    assert (made["apiVersion"], made["kind"]) == ("batch/v1", "Job")
    assert set(made["spec"]) == {"backoffLimit", "podFailurePolicy", "suspend", "template"}
    pod = schema["properties"]["spec"]["properties"]["mpiReplicaSpecs"]["additionalProperties"][
        "properties"
    ]["template"]
    validate(made["spec"]["template"], pod, "template")
    words = made["spec"]["template"]["spec"]["containers"][0]["command"]
    assert ("--elastic 2:16" in " ".join(words)) == (form == "elastic") and words[-1] == "train"


@pytest.mark.parametrize("form", batch.FORMS)
def test_yaml_says_the_same(form):
    yaml = pytest.importorskip("yaml")
    slots = {"slots": 4 if form == "mpijob" else None}
    made = batch.kubernetes(
        ["train.py", "it's: \"#", "yes", "1e3"], **{**ALL, "form": form, **slots}
    )
    assert yaml.safe_load(batch.text(made)) == made


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ranks": 6}, "-n 6 is no multiple of --slots 4"),
        ({"ranks": 0}, "-n is 0"),
        ({"slots": 0}, "--slots is 0"),
        ({"form": "job"}, "--slots 4 is of --form mpijob, and this is job"),
        ({"least": 2}, "--least 2 is of --form elastic, and this is mpijob"),
        ({"form": "elastic", "slots": None, "least": 17}, "--least 17 is more than -n 16"),
        ({"image": "I J"}, "--image is 'I J'"),
        ({"memory": "500m"}, "--memory is '500m'"),
        ({"memory": "1ki"}, "--memory is '1ki'"),
        ({"name": "A_b"}, "--name is 'A_b'"),
        ({"queue": "a\n"}, r"--queue is 'a\\n'"),
        ({"memory": "much"}, "--memory is 'much'"),
        ({"form": "pod"}, "choose from mpijob, job, elastic"),
    ],
)
def test_what_kubernetes_would_not_take(given, message):
    with pytest.raises(ConfigError, match=message):
        batch.kubernetes(["train"], **{**ALL, **given})


def test_words_reach_the_container_as_they_are():
    """Kubernetes (expansion of a container's command) makes "$$" into "$", and "$(A)" into a
    variable's value.
    """
    made = batch.kubernetes(
        ["train.py", "$(HOME)", "a$$b", "$"], image="I", ranks=1, name="n", form="job"
    )
    assert made["spec"]["template"]["spec"]["containers"][0]["command"][-3:] == [
        "$$(HOME)",
        "a$$$$b",
        "$$",
    ]


def test_the_pods_of_an_mpijob_share_the_run_directory():
    spec = batch.kubernetes(["train.py"], image="I", ranks=2, name="n")["spec"]["mpiReplicaSpecs"]
    for pod in spec.values():
        assert {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}} in pod["template"][
            "spec"
        ]["volumes"]


def test_quantities_are_not_rounded():
    worker = batch.kubernetes(
        ["t"], image="I", ranks=3, name="n", slots=3, memory="8589934593", cpu="0.1"
    )
    limits = worker["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0][
        "resources"
    ]["limits"]
    assert limits == {"cpu": "0.3", "memory": "25769803779"}
    batch.kubernetes(["t"], image="I", ranks=1, name="n", memory="1048576Ki", shm="1.5G")


def test_names_of_jobs():
    names = [["my_train.py", "-x"], ["-m", "pkg.train"], ["./a/B.sh"], ["train"], ["..."]]
    assert [batch.name_of(words) for words in names] == [
        "my-train",
        "pkg-train",
        "b-sh",
        "train",
        "job",
    ]


def test_a_script_for_sbatch_passes_words_whole(tmp_path):
    words = ["a b", "it's", "$HOME `id`", "--seed={task}", "{task}", "", "*"]
    python = tmp_path / "python"
    script = batch.slurm(
        ["show.py", *words],
        nodes=2,
        ntasks_per_node=3,
        name="n",
        array="0-3",
        scratch=str(tmp_path),
    )
    script = re.sub(r"^\S+ -m odyssey", f"{python} -m odyssey", script, flags=re.M)
    python.write_text('#!/bin/sh\nfor word; do printf "%s\\n" "<$word>"; done\n')
    for tool in ("srun", "scontrol"):
        (tmp_path / tool).write_text("#!/bin/sh\nexit 0\n")
        (tmp_path / tool).chmod(0o755)
    python.chmod(0o755)
    given = {
        "SLURM_JOB_ID": "9",
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "2",
        "SLURM_JOB_NUM_NODES": "2",
    }
    where = {"PATH": f"{tmp_path}:/usr/bin:/bin", **given}
    done = subprocess.run(
        ["bash", "-c", script], env=where, capture_output=True, text=True, timeout=60
    )
    wanted = ["-m", "odyssey", "launch", "-n", "6", "--run-dir", "runs/n-7-2", "show.py"]
    wanted += [word.replace("{task}", "2") for word in words]
    assert (done.stdout.splitlines(), done.stderr) == ([f"<{word}>" for word in wanted], "")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"options": ["--x=a b"]}, "--sbatch is '--x=a b'; .* is allowed"),
        (
            {"options": ["partition=long"]},
            "--sbatch is 'partition=long'; an option such as --partition=long",
        ),
        (
            {"options": ["--nodes=3"]},
            "--sbatch '--nodes=3'; `odyssey slurm` has an option of its own",
        ),
        ({"options": ["-t5"]}, "--sbatch '-t5'; `odyssey slurm` has an option of its own"),
        ({"name": "a\nb"}, "'--job-name=a.*is allowed"),
        ({"setup": ["a\nb"]}, "one line is allowed"),
        ({"nodes": 0}, "-N is 0"),
        ({"array": "many"}, "--array is 'many'; such as 0-9"),
        ({"time": "soon"}, "--time is 'soon'; such as 90"),
        ({"time": "1:2:3:4"}, "--time is '1:2:3:4'"),
        ({"time": "2"}, "--time 2 ends within --warn 120 seconds"),
        ({"time": "0:01:59"}, "--time 0:01:59 ends within"),
        (
            {"command": ["train", "--seed={task}"]},
            "{task} is the number of a job array's task; give --array",
        ),
    ],
)
def test_what_has_no_place_in_a_script(given, message):
    with pytest.raises(ConfigError, match=rf"\[batch\] .*{message}"):
        batch.slurm(
            **{"command": ["train"], "nodes": 1, "ntasks_per_node": 1, "name": "n", **given}
        )


def test_time_limits_of_sbatch_are_taken():
    for time in ("3", "2:01", "0:02:01", "1-0", "1-0:0", "0-0:2:1", "0", "0:00:00"):
        options = {
            "nodes": 1,
            "ntasks_per_node": 1,
            "name": "n",
            "options": ["--nodelist=h1", "-pall"],
        }
        assert f"\n#SBATCH --time={time}\n" in batch.slurm(
            ["train"], time=time, array="1,3,5-9:2%2", **options
        )


@pytest.mark.parametrize(
    "words",
    [
        ["slurm", "--scratc", "/x"],
        ["slurm", "--launch=--watchdg=5"],
        ["k8s", "--image=I", "--slot=3"],
    ],
)
def test_a_mistyped_option_is_no_script(tmp_path, words):
    done = subprocess.run(
        [sys.executable, "-m", "odyssey", *words, "train"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (64, "") and "No such option '--" in done.stderr, (
        done.stderr
    )
    assert "Did you mean" in done.stderr


# -- `odyssey train` with the words of other platforms ---------------------------------------------


def train(tmp_path, *words):
    command = [sys.executable, "-m", "odyssey", "train", *words]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)


def test_a_script_is_started_by_train(tmp_path):
    (tmp_path / "show.py").write_text(
        "import sys\nfrom mpi4py import MPI\nsys.stdout.write(f'size {MPI.COMM_WORLD.size} "
        "{sys.argv[1:]}\\n')\n"
    )
    done = train(
        tmp_path,
        "--script",
        "show.py",
        "--num-gpus",
        "2",
        "--backend",
        "pytorch-ddp",
        "--lr",
        "0.1",
    )
    assert (done.returncode, done.stdout) == (0, "size 2 ['--lr', '0.1']\n" * 2), done.stderr
    assert train(tmp_path, "--num-nodes=1", "--steps", "1", "--no-eval").returncode == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--script", "t.py", "--num-nodes", "4", "--gpus-per-node", "8"],
            "`odyssey slurm -N 4 --ntasks-per-node 8 t.py >",
        ),
        (
            ["--script", "t.py", "--num-nodes", "4", "--gpus-per-node", "8"],
            "`odyssey launch -n 32 --hosts h1:8,h2:8 t.py`",
        ),
        (["--address", "ray://head:10001", "--backend", "ray"], "odyssey.ray.RayTrainer"),
        (
            ["--script", "t.py", "--backend", "mxnet"],
            "--backend mxnet is unknown; choose from auto",
        ),
        (
            ["--backend", "tensorflow"],
            "another framework; a Keras model trains with KERAS_BACKEND=torch",
        ),
        (["--num-nodes", "many"], "'many' is not a valid integer"),
    ],
)
def test_the_command_that_does_is_named(tmp_path, words, message):
    done = train(tmp_path, *words)
    assert done.returncode == 64 and message in done.stderr and "Traceback" not in done.stderr, (
        done.stderr
    )
