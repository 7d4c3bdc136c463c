"""What compare.py measured, as tables in Markdown.

Pure; nothing is judged here but what the words below say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from calls import KINDS
from common import median

TITLES = {
    "restart": "SIGKILL of one of 4 ranks, one restart allowed",
    "launcher": "SIGKILL of the launcher, 3 s later",
    "exception": "An exception in rank 1 of 4",
    "exit": "sys.exit(3) in rank 1 of 4",
    "stop": "SIGSTOP of rank 1 of 4; the timeout of each set to 3 s",
    "calls": "Collectives of two ranks that do not match",
    "replicas": "One bit of one weight of rank 1 of 4 flips at step 8 of 120",
    "resume": "4 ranks, killed; resumed on 3, killed; resumed on 1",
    "kills": "SIGKILL while saving without a pause (25 MB)",
    "damage": "A bit flips, a file is cut, in the newest of two checkpoints",
}


def everything(results: dict[str, Any]) -> str:
    """All tables of what was measured, each under its title."""
    return "\n".join(
        f"### {TITLES[topic]}\n\n{_TABLES[topic](results[topic])}\n"
        for topic in TITLES
        if topic in results
    )


def markdown(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(
        "| " + " | ".join("-" if cell is None else str(cell) for cell in line) + " |"
        for line in lines
    )


def _yes(value: Any) -> str:
    return "yes" if value else "no"


def _restart(found: dict[str, Any]) -> str:
    rows = []
    for name, one in found.items():
        runs, took = one["runs"], [run["seconds"] for run in one["runs"] if run["went_on"]]
        good = sum(run["went_on"] for run in runs)
        same = sum(run["went_on"] and run["same_bytes"] for run in runs)
        rows.append(
            [
                name,
                f"{good} of {len(runs)}",
                f"{median(took):.1f} / {max(took):.1f}" if took else None,
                f"{same} of {good}" if good else None,
                _yes(one["undisturbed_twice_same"]),
            ]
        )
    heads = [
        "",
        "went on",
        "kill to first new step, s: median / most",
        "bytes of the undisturbed run",
    ]
    return markdown([*heads, "undisturbed twice: same bytes"], rows)


def _launcher(found: dict[str, Any]) -> str:
    rows = []
    for name, runs in found.items():
        files = sorted({_plain_name(file) for run in runs for file in run["files"]})
        processes = max(len(run["processes"]) for run in runs)
        most = max(len(run["files"]) for run in runs)
        rows.append([name, processes, f"{most}: {', '.join(files)}" if files else 0, len(runs)])
    return markdown(["", "processes left, at most", "files left, at most", "runs"], rows)


def _plain_name(file: str) -> str:
    """Without what differs from run to run."""
    folder, _, name = file.rpartition("/")
    for cut in (
        "torchelastic_",
        "mpich_shm_",
        "ompi.",
        "hydra_hwloc_xmlfile_",
        "sm_segment.",
        "ucx_shm_",
    ):
        if name.startswith(cut):
            return f"`{folder}/{cut}*`"
    return f"`{folder}/{name}`"


def _ends(found: dict[str, Any]) -> str:
    rows = []
    for name, runs in found.items():
        over = [run for run in runs if run["seconds"] is not None]
        if not over:
            rows.append([name, f"not within {runs[0]['watched']:.0f} s", None, None, len(runs)])
            continue
        named = [run["named"] or "none" for run in over]
        rows.append(
            [
                name,
                f"{median([run['seconds'] for run in over]):.1f}"
                + ("" if len(over) == len(runs) else " (not all)"),
                ", ".join(sorted({str(run["code"]) for run in over})),
                ", ".join(sorted(set(named))),
                len(runs),
            ]
        )
    return markdown(["", "ended after, s (median)", "exit code", "names", "runs"], rows)


def _stop(found: dict[str, Any]) -> str:
    rows = []
    for name, runs in found.items():
        over = [run["seconds"] for run in runs if run["seconds"] is not None]
        told = [run["told"] for run in runs if run["told"] is not None]
        rows.append(
            [
                name,
                f"{median(told):.1f}" if told else "nothing said",
                f"{median(over):.1f}" if over else f"not within {runs[0]['watched']:.0f} s",
                ", ".join(sorted({str(run["code"]) for run in runs})),
                ", ".join(sorted({run["named"] or "none" for run in runs})),
                len(runs),
            ]
        )
    return markdown(
        [
            "",
            "first message after, s",
            "ended after, s (medians)",
            "exit code",
            "names as the cause",
            "runs",
        ],
        rows,
    )


def _call(one: dict[str, Any]) -> str:
    if one["verdict"] == "error":
        names = ", both calls and their lines named" if one["names_lines"] else ""
        names = names or (", both calls named" if one["names_calls"] else "")
        timed_out = any("Timed out" in text for text in one["raised"].values())
        return f"error after {one['seconds']:.1f} s{' (timeout)' if timed_out else names}"
    got = ", ".join(
        f"rank {rank} got {text.split()[0]}" for rank, text in sorted(one["got"].items())
    )
    if one["verdict"] == "wrong":
        return f"**no error**: {got}"
    if one["verdict"] == "died":
        return f"dies after {one['seconds']:.1f} s, code {one['code']}" + (
            f"; **before, {got}**" if got else ""
        )
    return f"hangs ({one['watched']:.0f} s watched)" + (f"; **{got}**" if got else "")


def _calls(found: dict[str, Any]) -> str:
    rows = [
        [name.replace(" launch", ""), *(_call(one[kind]) for kind in KINDS)]
        for name, one in found.items()
    ]
    return markdown(["", *KINDS.values()], rows)


def _replicas(found: dict[str, Any]) -> str:
    rows = []
    for name, one in found.items():
        noticed = one["code"] not in (0, None)
        rows.append([name, _yes(noticed), one["code"], one["named"] if noticed else None])
    return markdown(["", "noticed", "exit code", "names"], rows)


def _resume(found: dict[str, Any]) -> str:
    rows = [
        [name, _yes(one["same_bytes"]), one["first_step_that_differs"], "; ".join(one["steps_on"])]
        for name, one in found.items()
    ]
    return markdown(
        ["", "bytes of the run on 4 ranks", "first step that differs", "steps made"], rows
    )


def _kills(found: dict[str, Any]) -> str:
    rows = [
        [name, f"{one['lost']} of {one['kills']}", one["nothing loads"], one["mixed"], one["older"]]
        for name, one in found.items()
    ]
    heads = ["", "lost", "nothing loads", "loads, numbers mixed or wrong", "an older one loads"]
    return markdown(heads, rows)


def _damage(found: dict[str, Any]) -> str:
    rows = []
    for name, one in found.items():
        cells = []
        for what in ("flips", "cuts"):
            some = one[what]
            cells.append(f"{some['silent']} of {some['count']}")
            cells.append(f"{some['found']} + {some['fell_back']} + {some['harmless']}")
        rows.append([name, *cells])
    parts = "error + older one used + harmless"
    return markdown(["", "flipped bit: silent", parts, "cut file: silent", parts], rows)


_TABLES = {
    "restart": _restart,
    "launcher": _launcher,
    "exception": _ends,
    "exit": _ends,
    "stop": _stop,
    "calls": _calls,
    "replicas": _replicas,
    "resume": _resume,
    "kills": _kills,
    "damage": _damage,
}
