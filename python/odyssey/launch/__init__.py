"""Starting ranks and keeping a run going: `odyssey launch`, and the same from Python.

| file | what it is |
|---|---|
| hosts.py | names of hosts, strictly read; who gets how many ranks |

What it is not: `odyssey.launcher`, which reads what a launcher put into the environment of a rank.
"""
